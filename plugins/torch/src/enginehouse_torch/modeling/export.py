"""Writing a model as a Hugging Face directory while no rank holds more of it than one file's part."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from enginehouse.engines.model import TOKENIZER_COMPANIONS, TOKENIZER_FILES
from enginehouse.weights.buckets import pack_buckets

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig

    from enginehouse.engines.weights import ParamMeta

INDEX = "model.safetensors.index.json"
FILE_BYTES = 5 << 30
"""Most weights in one file, a larger parameter excepted: what the Hugging Face hub uses."""


def write_weights(
    directory: Path, parameters: list[ParamMeta], weights: Iterator[tuple[str, torch.Tensor]], writes: bool
) -> Exception | None:
    """Write safetensors files, and their index where there are several; remove weights of an earlier export.

    Args:
        directory: exists.
        parameters: all parameters, in the order of `weights`.
        weights: every whole parameter; exhausted on every rank, also where writing fails: gathering is collective.
        writes: False on ranks that only take part in gathering.

    Returns:
        What kept this rank from writing; None: nothing.
    """
    from safetensors.torch import save_file

    failure: Exception | None = None
    buckets = pack_buckets(parameters, FILE_BYTES)
    files: dict[str, str] = {}
    for number, bucket in enumerate(buckets, start=1):
        part = {}
        for _ in bucket:
            name, tensor = next(weights)
            if writes and failure is None:
                part[name] = tensor.detach().cpu().contiguous().clone()
        file = "model.safetensors" if len(buckets) == 1 else f"model-{number:05}-of-{len(buckets):05}.safetensors"
        files |= dict.fromkeys(part, file)
        if part:
            try:
                save_file(part, directory / file, {"format": "pt"})
            except Exception as error:
                failure = error
    for _ in weights:  # so that a gathering of all ranks ends
        pass
    if writes and failure is None:
        try:
            _complete(directory, files, sum(meta.nbytes for meta in parameters))
        except OSError as error:
            failure = error
    return failure


def _complete(directory: Path, files: dict[str, str], total_bytes: int) -> None:
    """Write the index where there are several files, and remove those of an export that was cut otherwise.

    One of these would be read in place of the new ones: transformers looks for a single file first.
    """
    kept = set(files.values())
    if len(kept) > 1:
        kept.add(INDEX)
        index = {"metadata": {"total_size": total_bytes}, "weight_map": files}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    for pattern in ("model.safetensors", "model-*-of-*.safetensors", INDEX):
        for stale in directory.glob(pattern):
            if stale.name not in kept:
                stale.unlink()


def write_companions(
    directory: Path,
    config: PreTrainedConfig,
    generation: GenerationConfig | None,
    dtype: torch.dtype,
    architecture: str,
    source: Path,
) -> None:
    """Write config and generation config, and copy the tokenizer of the directory the model came from.

    Args:
        directory: exists.
        config: the model's; it is told `dtype` and `architecture`.
        generation: None: the model cannot generate, or has none.
        dtype: of the weights that were written.
        architecture: name of the model's class in transformers.
        source: where the model came from.
    """
    config.dtype = dtype
    config.architectures = [architecture]
    config.save_pretrained(directory)
    if generation is not None:
        generation.save_pretrained(directory)
    copy_tokenizer(source, directory)


def copy_tokenizer(source: Path, directory: Path) -> None:
    """Copy the files of a model directory's tokenizer to another directory."""
    for pattern in (*TOKENIZER_FILES, *TOKENIZER_COMPANIONS):
        for file in filter(Path.is_file, source.glob(pattern)):
            shutil.copyfile(file, directory / file.name)
