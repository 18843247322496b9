"""Creates the task of the recipes and the quickstart, with its model and tokenizer, without downloads.

The task is to sort six digits: for the prompt `s524310=` the right response is `012345`, followed by the end of the
text. Two CPU cores learn it within two minutes. A model that has only seen the demonstrations is right about once in
fifty tries.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

T = TypeVar("T")

DIGITS = "0123456789"
LENGTH = 6
SPECIAL = ("<pad>", "<eos>", "<unk>")
VOCABULARY = (*SPECIAL, *DIGITS, *"s=+-*/%<>,.:?!@")
"""Twenty-eight tokens, one per character. Characters that this task does not use are for the user's own tasks."""

TRAIN_PROMPTS = 8_192
VALIDATION_PROMPTS = 512
DEMONSTRATIONS = 12_800
PAIRS = 12_800
VALIDATION_PAIRS = 512
NOISE = 0.44
"""Probability that a random digit replaces a digit of a demonstrated answer, which shows only the format."""


def make_task(directory: Path, seed: int = 0) -> None:
    """Write the files of `make_data`, and the model in `model/`."""
    make_data(directory, seed)
    make_model(directory / "model", seed)


def make_data(directory: Path, seed: int = 0) -> None:
    """Write prompts, demonstrations and pairs of responses. No two files have the same digits.

    `train.jsonl` and `validation.jsonl` have rows of `prompt` and `answer`, `demonstrations.jsonl` of `prompt` and
    `response`, `pairs.jsonl` and `validation_pairs.jsonl` of `prompt`, `chosen` and `rejected`.
    """
    rng = random.Random(seed)
    digits = draw_distinct(lambda: "".join(rng.choices(DIGITS, k=LENGTH)))
    directory.mkdir(parents=True, exist_ok=True)
    for name, count, row in (
        ("validation", VALIDATION_PROMPTS, _make_question),
        ("train", TRAIN_PROMPTS, _make_question),
        ("demonstrations", DEMONSTRATIONS, _make_demonstration),
        ("validation_pairs", VALIDATION_PAIRS, _make_pair),
        ("pairs", PAIRS, _make_pair),
    ):
        write_lines(directory / f"{name}.jsonl", (row(next(digits), rng) for _ in range(count)))


def prompt(digits: str) -> str:
    """Return the prompt that asks for `digits` in order.

    >>> prompt("524310")
    's524310='
    """
    return f"s{digits}="


def make_tokenizer(
    vocabulary: Sequence[str] = VOCABULARY, pieces: str = ".", eos: str = "<eos>"
) -> PreTrainedTokenizerFast:
    """Return a tokenizer.

    Args:
        vocabulary: its tokens, including `<pad>` and `<unk>`.
        pieces: regular expression for the text of a token.
        eos: token that ends a text.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pieces), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token=eos,
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def make_model(
    directory: Path,
    seed: int = 0,
    *,
    tied: bool = False,
    tokenizer: PreTrainedTokenizerFast | None = None,
    positions: int = 64,
) -> None:
    """Write a Qwen3 model of 126,912 random parameters, and its tokenizer, as a Hugging Face directory.

    Args:
        directory: directory to write.
        seed: seed of the weights.
        tied: use one matrix for the embedding and the head. A model can learn the task either way. Engines disagree on
            how to reload a tied head, so the quickstart's model has two matrices.
        tokenizer: tokenizer of another task; None: the tokenizer of this task.
        positions: maximum number of tokens of a text.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = tokenizer or make_tokenizer()
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,  # the smallest for which vLLM has CPU kernels
            max_position_embeddings=positions,
            initializer_range=0.05,
            tie_word_embeddings=tied,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def write_lines(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Write one JSON object per line."""
    with path.open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def draw_distinct(draw: Callable[[], T]) -> Iterator[T]:
    """Yield what `draw` returns, without repetitions."""
    seen: set[T] = set()
    while True:
        if (value := draw()) not in seen:
            seen.add(value)
            yield value


def _make_question(digits: str, rng: random.Random) -> dict[str, str]:
    """Return a prompt and its answer."""
    return {"prompt": prompt(digits), "answer": _make_answer(digits)}


def _make_demonstration(digits: str, rng: random.Random) -> dict[str, str]:
    """Return a prompt and a noisy answer."""
    answer = (rng.choice(DIGITS) if rng.random() < NOISE else digit for digit in sorted(digits))
    return {"prompt": prompt(digits), "response": "".join(answer)}


def _make_pair(digits: str, rng: random.Random) -> dict[str, str]:
    """Return a prompt, its answer, and the answer with one digit wrong."""
    right, place = _make_answer(digits), rng.randrange(LENGTH)
    wrong = rng.choice(DIGITS.replace(right[place], ""))
    return {"prompt": prompt(digits), "chosen": right, "rejected": right[:place] + wrong + right[place + 1 :]}


def _make_answer(digits: str) -> str:
    return "".join(sorted(digits))
