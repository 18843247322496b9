"""Tiny random models in real Hugging Face directories, created in milliseconds and cached for this process.

Characters are tokens: `CHARACTERS[i]` has id `i + len(SPECIAL_TOKENS)`. Nothing is downloaded.
"""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any, Literal

from enginehouse.engines.options import LoraOptions

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
    head: int = LEAST_HEAD,
    vocabulary: int = VOCABULARY_SIZE,
    max_positions: int = 128,
    initializer_range: float = 0.2,
) -> str:
    """Return the directory of a tiny fp32 model with random weights and a character tokenizer.

    By default two query heads share one key-value head. Heads have at least `head` dimensions. The large
    `initializer_range` gives distributions that are far from uniform, so that a wrong mask or position shows in a
    logprob.
    """
    from transformers import LlamaConfig, Qwen3Config

    cls = {"qwen3": Qwen3Config, "llama": LlamaConfig}[family]
    config = cls(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        head_dim=max(head, hidden // heads),
        max_position_embeddings=max_positions,
        tie_word_embeddings=tied,
        initializer_range=initializer_range,
        pad_token_id=PAD_ID,
        eos_token_id=EOS_ID,
        bos_token_id=None,
    )
    return _initialize(config, seed, f"{family}-{'tied' if tied else 'untied'}-")


@functools.cache
def tiny_experts(*, seed: int = 0, hidden: int = 128, experts: int = 4, max_positions: int = 128) -> str:
    """Return the directory of a tiny fp32 Qwen3 mixture of experts: heads of 32 dimensions, two experts per token."""
    from transformers import Qwen3MoeConfig

    cls: Any = Qwen3MoeConfig  # its stub lacks `head_dim`
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
    return _initialize(config, seed, "experts-")


def _initialize(config: Any, seed: int, prefix: str) -> str:
    """Write a model with random weights, and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return _save(model, prefix)


def _save(model: Any, prefix: str, tokenizer: Any = None) -> str:
    path = Path(tempfile.mkdtemp(prefix=prefix, dir=_root()))
    model.save_pretrained(path)
    (tokenizer or char_tokenizer()).save_pretrained(path)
    return str(path)


@functools.cache
def with_weight(model: str, name: str, place: tuple[int, ...], value: float) -> str:
    """Return a copy of a model's directory in which the element `place` of the stored tensor `name` is `value`."""
    weights = stored_tensors(model)
    weights[name][place] = value
    return _copy(model, weights, "altered-")


@functools.cache
def with_value_head(model: str) -> str:
    """Return a copy of a model's directory with a value head, whose values have a magnitude of about 1."""
    import torch

    weights = stored_tensors(model)
    hidden = weights["model.embed_tokens.weight"].shape[1]
    weights["score.weight"] = torch.randn(1, hidden, generator=torch.Generator().manual_seed(0)) / hidden**0.5
    return _copy(model, weights, "critic-")


def _copy(model: str, weights: dict[str, Any], prefix: str) -> str:
    """Copy a model's directory, with other weights."""
    from safetensors.torch import save_file

    path = Path(tempfile.mkdtemp(prefix=prefix, dir=_root()))
    shutil.copytree(model, path, dirs_exist_ok=True)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return str(path)


ADAPTER = LoraOptions(rank=4, alpha=8.0, targets="all-linear")
"""The adapter of adapted models, on every linear layer but the output layer."""

_ADAPTER_FOLDER = "adapter"


@functools.cache
def adapted_model(path: str, seed: int | None) -> str:
    """Return a copy of a model's directory with a random adapter added to its weights. The adapter itself is in a
    folder of the copy.

    Args:
        seed: seed of A and B; None: B is zero, so the weights stay those of the model.
    """
    import torch
    from safetensors.torch import save_file

    weights = stored_tensors(path)
    adapter: dict[str, Any] = {}
    generator = torch.Generator().manual_seed(seed or 0)
    for name, weight in weights.items():
        if ".layers." in name and weight.dim() == 2:
            down = torch.randn(ADAPTER.rank, weight.shape[1], generator=generator) / weight.shape[1] ** 0.5
            up = torch.randn(weight.shape[0], ADAPTER.rank, generator=generator) * (0.0 if seed is None else 0.05)
            weights[name] = weight + ADAPTER.alpha / ADAPTER.rank * up @ down
            layer = f"base_model.model.{name.removesuffix('.weight')}"
            adapter |= {f"{layer}.lora_A.weight": down, f"{layer}.lora_B.weight": up}
    copy = _copy(path, weights, "adapted-")
    Path(copy, _ADAPTER_FOLDER).mkdir()
    save_file(adapter, Path(copy, _ADAPTER_FOLDER, "adapter_model.safetensors"))
    return copy


def stored_adapter(directory: str) -> dict[str, Any]:
    """Return the adapter of a directory that `adapted_model` made, by name; empty for any other directory."""
    return stored_tensors(str(Path(directory, _ADAPTER_FOLDER)))


def stored_tensors(directory: str) -> dict[str, Any]:
    """Return all tensors of a directory's safetensors files, by name."""
    from safetensors.torch import load_file

    tensors: dict[str, Any] = {}
    for file in sorted(Path(directory).glob("*.safetensors")):
        tensors |= load_file(str(file))
    return tensors


@functools.cache
def with_layers(model: str, layers: int) -> str:
    """Return a copy of a model's directory with only the first layers, in the dtype in which it is stored."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from enginehouse.quiet import quiet_transformers

    config = AutoConfig.from_pretrained(model)
    text = config.get_text_config()
    layer_count = text.num_hidden_layers
    for name, value in vars(text).items():
        if isinstance(value, list) and len(value) == layer_count:  # one entry per layer
            setattr(text, name, value[:layers])
    text.num_hidden_layers = layers
    with quiet_transformers():  # it would list the weights of the other layers
        shortened: Any = AutoModelForCausalLM.from_pretrained(model, config=config, dtype="auto")
    return _save(shortened, f"{layers}-layers-", AutoTokenizer.from_pretrained(model))


@functools.cache
def stepped_model(path: str, steps: int, lr: float = 1e-6) -> str:
    """Return the directory of a model after `steps` steps of AdamW, all on the same row of random tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ids = torch.randint(VOCABULARY_SIZE, (1, 64), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    return _save(model, f"{Path(path).name}-{steps}-")


def char_tokenizer() -> Any:
    """Return a tokenizer with one token per character, and a plain chat template."""
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
