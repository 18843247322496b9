"""Writing a model as a Hugging Face directory while no rank holds more of it than one file's part."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from enginehouse.engines.model import TOKENIZER_COMPANIONS, TOKENIZER_FILES
from enginehouse.engines.weights import pack_buckets

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from enginehouse.engines.weights import ParamMeta

FILE_BYTES = 5 << 30
"""Most weights in one file, a larger parameter excepted: what the Hugging Face hub uses."""


def write_weights(
    directory: Path, parameters: list[ParamMeta], weights: Iterator[tuple[str, torch.Tensor]], writes: bool
) -> None:
    """Write safetensors files, and their index where there are several.

    Args:
        directory: exists.
        parameters: all parameters, in the order of `weights`.
        weights: every whole parameter; exhausted on every rank.
        writes: False on ranks that only take part in gathering.
    """
    from safetensors.torch import save_file

    buckets = pack_buckets(parameters, FILE_BYTES)
    files: dict[str, str] = {}
    for number, bucket in enumerate(buckets, start=1):
        part = {}
        for _ in bucket:
            name, tensor = next(weights)
            if writes:
                part[name] = tensor.detach().cpu().contiguous().clone()
        file = "model.safetensors" if len(buckets) == 1 else f"model-{number:05}-of-{len(buckets):05}.safetensors"
        files |= dict.fromkeys(part, file)
        if writes:
            save_file(part, directory / file, {"format": "pt"})
    for _ in weights:  # so that a gathering of all ranks ends
        pass
    if writes and len(buckets) > 1:
        index = {"metadata": {"total_size": sum(meta.nbytes for meta in parameters)}, "weight_map": files}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def write_companions(directory: Path, model: PreTrainedModel, dtype: torch.dtype, source: Path) -> None:
    """Write config and generation config, and copy the tokenizer of the directory the model came from."""
    model.config.dtype = dtype
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(directory)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(directory)
    for pattern in (*TOKENIZER_FILES, *TOKENIZER_COMPANIONS):
        for file in filter(Path.is_file, source.glob(pattern)):
            shutil.copyfile(file, directory / file.name)
