"""A made-up model of a given size: Qwen3's shape, random weights, written a shard at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

SHARD_BYTES = 256 << 20
SMALL_PARAMETERS = 100_000_000
"""Below this size a model is narrower too, because its vocabulary would otherwise exceed the size."""


def write_model(path: Path, parameters: int) -> int:
    """Write a model of about `parameters` parameters, float32, unless it exists; return their exact number."""
    import torch
    from safetensors.torch import save_file

    config, shapes = describe(parameters)
    count = sum(shape.numel() for shape in shapes.values())
    finished = path / "model.safetensors.index.json"
    if finished.exists():
        return count
    path.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(path)
    generator = torch.Generator().manual_seed(0)
    files: dict[str, str] = {}
    for number, names in enumerate(shards(shapes)):
        tensors = {}
        for name in names:
            drawn = torch.empty(shapes[name])
            tensors[name] = drawn.fill_(1.0) if drawn.dim() == 1 else drawn.normal_(0.0, 0.02, generator=generator)
        file = f"model-{number:05d}.safetensors"
        save_file(tensors, path / file, metadata={"format": "pt"})
        files |= dict.fromkeys(names, file)
    finished.write_text(json.dumps({"metadata": {"total_size": 4 * count}, "weight_map": files}))
    return count


def describe(parameters: int) -> tuple[object, dict[str, object]]:
    """Return the config of a model of about `parameters` parameters and the parameters' shapes. Embeddings are tied."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    hidden, vocabulary = (1024, 65536) if parameters >= SMALL_PARAMETERS else (256, 8192)
    heads = hidden // 64
    a_block = hidden * (2 * hidden + 2 * hidden + 2 * hidden + 3 * 3 * hidden)  # queries, keys and values, output, MLP
    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=3 * hidden,
        num_hidden_layers=max(1, round((parameters - vocabulary * hidden) / a_block)),
        num_attention_heads=heads, num_key_value_heads=heads // 2, head_dim=2 * hidden // heads,
        max_position_embeddings=4096, tie_word_embeddings=True, dtype="float32",
        architectures=["Qwen3ForCausalLM"],
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return config, {name: parameter.shape for name, parameter in model.named_parameters()}


def shards(shapes: dict[str, object]) -> Iterator[list[str]]:
    """Yield names, in order, in groups of about `SHARD_BYTES`."""
    group: list[str] = []
    size = 0
    for name, shape in shapes.items():
        group.append(name)
        size += 4 * shape.numel()
        if size >= SHARD_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group
