"""Make the model that `grpo.py` begins from: it knows the form of an answer, and gets one in fifty right.

    python examples/loop/warm_up.py            # writes runs/loop/model

It is a supervised loop with the same library and another loss. In the demonstrations nearly half the digits are wrong.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from enginehouse.library import Batch, Engine, LossSpec, LossValue, Ragged, TokenView, start_engines

DIGITS, NOISE, STEPS, ROWS = "0123456789", 0.44, 100, 128


def make_model(directory: str | Path) -> PreTrainedTokenizerFast:
    """Write a model of 127,000 random parameters with a token a character, and return its tokenizer."""
    vocabulary = {token: place for place, token in enumerate(["<pad>", "<eos>", "<unk>", *DIGITS, *"s="])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("<eos>|."), behavior="isolated")
    characters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    ends = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0, "tie_word_embeddings": False}
    config = Qwen3Config(vocab_size=len(vocabulary), initializer_range=0.05, **shape, **heads, **ends)
    Qwen3ForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return tokenizer


def demonstrations(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> Iterator[Batch]:
    """Yield batches of prompts with noisy answers."""
    while True:
        digits = ["".join(rng.choices(DIGITS, k=6)) for _ in range(ROWS)]
        noisy = ["".join(rng.choice(DIGITS) if rng.random() < NOISE else d for d in sorted(row)) for row in digits]
        rows = [f"s{row}={answer}<eos>" for row, answer in zip(digits, noisy)]
        tokens = Ragged.from_list(tokenizer(rows).input_ids)
        yield Batch({"input_ids": tokens, "loss_mask": Ragged.from_list([[False] * 8 + [True] * 7] * ROWS)})


def supervised(tokens: TokenView) -> LossValue:
    """Compute the negative log-likelihood of the demonstrated tokens."""
    mask = tokens.columns["loss_mask"]
    return LossValue(-tokens.outputs["logprobs"][mask].sum(), float(mask.sum()))


def main(directory: str = "runs/loop/model") -> None:
    """Warm a new model up, and write it."""
    with TemporaryDirectory() as fresh:
        batches = demonstrations(make_model(fresh), random.Random(0))
        with start_engines(fresh, actor=Engine("torch", {"lr": 3e-3, "warmup_steps": 10})) as roles:
            for step, batch in zip(range(1, STEPS + 1), batches):
                metrics = roles.actor.update(batch, LossSpec("warm_up:supervised"))
                if step % 20 == 0:
                    print(f"step {step}  loss {metrics['loss'].value:.3f}", flush=True)
            roles.actor.export_hf(directory)


if __name__ == "__main__":
    main()
