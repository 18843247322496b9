"""Checkpoints of a replicated model: a directory that appears whole or not at all, loadable by any number of ranks.

Files, each of them there if its part was saved:

* `model.safetensors`: the model's state dict, tied parameters once.
* `optimizer.safetensors`: both moments by parameter, and the step in the metadata.
* `rng.safetensors`: random states by rank.

Nothing in them is pickled.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from enginehouse.modeling.files import CheckpointError


def write_part(
    directory: Path, part: str, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, int] | None = None
) -> None:
    """Write a part's tensors, and numbers beside them."""
    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(
        stored, directory / f"{part}.safetensors", {name: str(number) for name, number in (numbers or {}).items()}
    )


def read_into(path: str, part: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Overwrite `tensors` with those of a part, all or none, and return its numbers.

    Raises:
        CheckpointError: the part is not there, or its tensors differ in name or shape from `tensors`.
    """
    with _open_part(path, part) as stored:
        there = set(stored.keys())
        for said, names in (("lacks", set(tensors) - there), ("has an unknown", there - set(tensors))):
            if names:
                raise CheckpointError(f"{part} in checkpoint {path!r} {said} {min(names)!r} ({len(names)} such): it is "
                                      "a checkpoint of another model")  # fmt: skip
        for name, tensor in tensors.items():
            if (shape := tuple(stored.get_slice(name).get_shape())) != tuple(tensor.shape):
                raise CheckpointError(f"{name!r} in checkpoint {path!r} has shape {shape}, here {tuple(tensor.shape)}")
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(stored.get_tensor(name))
        return {name: int(number) for name, number in (stored.metadata() or {}).items()}


def read_part(path: str, part: str) -> dict[str, torch.Tensor]:
    """All tensors of a part.

    Raises:
        CheckpointError: the part is not there.
    """
    with _open_part(path, part) as stored:
        return {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 (safe_open has keys() only)


def _open_part(path: str, part: str):
    file = Path(path) / f"{part}.safetensors"
    if not file.is_file():
        raise CheckpointError(f"checkpoint {path!r} has no {file.name}; was it saved with {part!r}?")
    return safe_open(str(file), framework="pt")
