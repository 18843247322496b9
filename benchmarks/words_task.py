"""The task of the medium size of `benchmarks.grpo`: random weights, prompts of made-up words, a reward for some words.

There is nothing to learn, because only the cost of a step matters.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

WORDS = 8192
PROMPTS = 4096
PROMPT_WORDS = 16
SPECIAL = ("<pad>", "<eos>", "<unk>")


def even_words(prompt: str, response: str, **columns: object) -> float:
    """Return the fraction of a response's words that have even numbers.

    >>> even_words("w3 w4", "w8 w9 w10 w12")
    0.75
    """
    words = response.split()
    return sum(int(word[1:]) % 2 == 0 for word in words) / max(1, len(words))


def make(directory: Path, seed: int = 0) -> Path:
    """Write `train.jsonl`, and `model`: Qwen3's shape, 19 million parameters, with a tokenizer; return the model."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    numbers = random.Random(seed)
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "train.jsonl").open("w") as file:
        for _ in range(PROMPTS):
            chosen = (f"w{numbers.randrange(len(SPECIAL), WORDS)}" for _ in range(PROMPT_WORDS))
            file.write(json.dumps({"prompt": " ".join(chosen)}) + "\n")
    names = [*SPECIAL, *(f"w{number}" for number in range(len(SPECIAL), WORDS))]
    words = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    ).save_pretrained(directory / "model")
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=WORDS, hidden_size=384, num_hidden_layers=9, num_attention_heads=6, num_key_value_heads=3,
        head_dim=64, intermediate_size=1152, max_position_embeddings=512, tie_word_embeddings=True, pad_token_id=0,
        eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(directory / "model")
    return directory / "model"


def product_seconds(rows: int, new_tokens: int, model: Path, threads: int = 2) -> float:
    """Return the seconds of generation's matrix products without attention, from the median of some tokens."""
    import statistics
    import time

    import torch
    from transformers import AutoModelForCausalLM

    weights = [w for w in AutoModelForCausalLM.from_pretrained(model).parameters() if w.dim() == 2]  # the head is tied
    inputs = {width: torch.randn(rows, width) for width in {weight.shape[1] for weight in weights}}
    seconds = []
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    with torch.no_grad():
        for _ in range(20):
            begun = time.perf_counter()
            for weight in weights:
                torch.nn.functional.linear(inputs[weight.shape[1]], weight)
            seconds.append(time.perf_counter() - begun)
    torch.set_num_threads(before)
    return new_tokens * statistics.median(seconds)
