"""Tiny random models: real Hugging Face directories, made in milliseconds, cached for this process.

Characters are tokens: `CHARACTERS[i]` has id `i + len(SPECIAL_TOKENS)`. Nothing is downloaded.
"""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any, Literal

SPECIAL_TOKENS = ("<pad>", "<eos>", "<unk>")
CHARACTERS = "0123456789abcdefghijklmn=+-. "
VOCABULARY_SIZE = len(SPECIAL_TOKENS) + len(CHARACTERS)
PAD_ID, EOS_ID = 0, 1
LEAST_HEAD = 16
"""The smallest heads that `flex_attention` has kernels for on GPUs."""

Family = Literal["qwen3", "llama"]


@functools.cache
def _root() -> Path:
    root = Path(tempfile.mkdtemp(prefix="enginehouse-test-models-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


@functools.cache
def tiny_model(
    family: Family = "qwen3",
    tied: bool = True,
    *,
    seed: int = 0,
    hidden: int = 32,
    layers: int = 2,
    heads: int = 4,
    key_value_heads: int = 2,
    vocabulary: int = VOCABULARY_SIZE,
    max_positions: int = 128,
    initializer_range: float = 0.2,
) -> str:
    """Directory of a tiny fp32 model with random weights and a character tokenizer.

    By default two query heads share one key-value head; heads are no smaller than GPU kernels take. The large
    `initializer_range` makes distributions far from uniform, so that a wrong mask or position shows in a logprob.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    path = Path(tempfile.mkdtemp(prefix=f"{family}-{'tied' if tied else 'untied'}-", dir=_root()))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            _config(family, tied, hidden, layers, heads, key_value_heads, vocabulary, max_positions, initializer_range),
            dtype=torch.float32,
        )
    model.save_pretrained(path)
    char_tokenizer().save_pretrained(path)
    return str(path)


@functools.cache
def tiny_experts(*, seed: int = 0, hidden: int = 128, experts: int = 4, max_positions: int = 128) -> str:
    """Directory of a tiny fp32 mixture of experts of Qwen3's shape, with heads of 32; two experts a token."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    cls: Any = Qwen3MoeConfig  # its stub does not know `head_dim`
    config = cls(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        moe_intermediate_size=64,
        num_experts=experts,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        head_dim=32,
        max_position_embeddings=max_positions,
        tie_word_embeddings=False,
        initializer_range=0.2,
        pad_token_id=PAD_ID,
        eos_token_id=EOS_ID,
        bos_token_id=None,
    )
    path = Path(tempfile.mkdtemp(prefix="experts-", dir=_root()))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    char_tokenizer().save_pretrained(path)
    return str(path)


@functools.cache
def with_weight(model: str, name: str, place: tuple[int, ...], value: float) -> str:
    """Directory of a copy of a model in which one weight is another.

    Args:
        model: the model's directory.
        name: of the tensor, as it is stored.
        place: the weight's index in it.
        value: what it is in the copy.
    """
    from safetensors.torch import load_file, save_file

    path = Path(tempfile.mkdtemp(prefix="altered-", dir=_root()))
    shutil.copytree(model, path, dirs_exist_ok=True)
    file = path / "model.safetensors"
    weights = load_file(file)
    weights[name][place] = value
    save_file(weights, file, metadata={"format": "pt"})
    return str(path)


@functools.cache
def with_value_head(model: str) -> str:
    """Directory of a copy of a model that has a value head, whose values are of the size of 1."""
    import torch
    from safetensors.torch import load_file, save_file

    path = Path(tempfile.mkdtemp(prefix="critic-", dir=_root()))
    shutil.copytree(model, path, dirs_exist_ok=True)
    file = path / "model.safetensors"
    weights = load_file(file)
    hidden = weights["model.embed_tokens.weight"].shape[1]
    weights["score.weight"] = torch.randn(1, hidden, generator=torch.Generator().manual_seed(0)) / hidden**0.5
    save_file(weights, file, metadata={"format": "pt"})
    return str(path)


@functools.cache
def stepped_model(path: str, steps: int, lr: float = 1e-6) -> str:
    """Directory of a model after some steps of AdamW on a row of random tokens; the more steps go on from the fewer."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ids = torch.randint(VOCABULARY_SIZE, (1, 64), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    stepped = Path(tempfile.mkdtemp(prefix=f"{Path(path).name}-{steps}-", dir=_root()))
    model.save_pretrained(stepped)
    char_tokenizer().save_pretrained(stepped)
    return str(stepped)


def _config(
    family: Family,
    tied: bool,
    hidden: int,
    layers: int,
    heads: int,
    key_value_heads: int,
    vocabulary: int,
    max_positions: int,
    initializer_range: float,
) -> Any:
    from transformers import LlamaConfig, Qwen3Config

    cls = {"qwen3": Qwen3Config, "llama": LlamaConfig}[family]
    return cls(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        head_dim=max(LEAST_HEAD, hidden // heads),
        max_position_embeddings=max_positions,
        tie_word_embeddings=tied,
        initializer_range=initializer_range,
        pad_token_id=PAD_ID,
        eos_token_id=EOS_ID,
        bos_token_id=None,
    )


def char_tokenizer() -> Any:
    """A tokenizer with one token a character, and a plain chat template."""
    from tokenizers import Regex, Tokenizer, decoders
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    words = (*SPECIAL_TOKENS, *CHARACTERS)
    inner = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = Split(Regex("."), behavior="isolated")
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return tokenizer
