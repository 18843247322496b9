"""A model's tensors by name: tied ones once, under the name its Hugging Face checkpoint uses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def unique_state(model: torch.nn.Module, preferred: frozenset[str] = frozenset()) -> dict[str, torch.Tensor]:
    """The model's state dict, detached, tied parameters once: under the first name in `preferred`, or the first."""
    further = tied_names(model, preferred)
    return {name: tensor.detach() for name, tensor in model.state_dict().items() if name not in further}


def tied_names(model: torch.nn.Module, preferred: frozenset[str] = frozenset()) -> frozenset[str]:
    """The further names of tied parameters: those under which `unique_state` does not list them."""
    named = list(model.named_parameters(remove_duplicate=False))
    kept: dict[int, str] = {}
    for name, parameter in named:
        known = kept.get(id(parameter))
        if known is None or (known not in preferred and name in preferred):
            kept[id(parameter)] = name
    return frozenset(name for name, _ in named) - set(kept.values())


INDEX = "model.safetensors.index.json"


def weight_files(path: Path) -> list[Path]:
    """List the safetensors files of a model directory that transformers reads.

    Returns:
        `model.safetensors`, else the files that the index names, else all: a directory may hold the same weights once
        more, under other names.
    """
    if (whole := path / "model.safetensors").is_file():
        return [whole]
    if (path / INDEX).is_file():
        return sorted({path / file for file in _indexed(path).values()})
    return sorted(path.glob("*.safetensors"))


def stored_names(path: Path) -> frozenset[str]:
    """Names of the tensors in a directory's safetensors files; empty where there are none."""
    files = weight_files(path)
    if (path / INDEX).is_file() and path / "model.safetensors" not in files:
        return frozenset(_indexed(path))
    from safetensors import safe_open

    names: set[str] = set()
    for file in files:
        with safe_open(str(file), framework="pt") as tensors:
            names.update(tensors.keys())
    return frozenset(names)


def _indexed(path: Path) -> dict[str, str]:
    files: dict[str, str] = json.loads((path / INDEX).read_text())["weight_map"]
    return files
