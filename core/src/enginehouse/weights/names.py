"""A model's tensors by name: tied ones once, under the name its Hugging Face checkpoint uses."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


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


@dataclass(frozen=True, slots=True)
class Target:
    """Where a stored tensor goes.

    Attributes:
        name: the tensor of the model that it is, or is a part of; where it is neither, what it would be called there.
        is_read: whether the model has a tensor of that name.
        is_whole: whether it is that tensor as it is.
    """

    name: str
    is_read: bool
    is_whole: bool


def names_in_model(model: PreTrainedModel, stored: Iterable[str]) -> dict[str, Target]:
    """Find where each stored tensor goes, as transformers does when it loads them: by the class's own mapping of names.

    A model that transformers did not load is told which of the mapping was used, as it tells one that it loads: else it
    could not give all names back.

    Args:
        model: on any device, the meta device included.
        stored: names in the checkpoint.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, WeightConverter)]
    state, prefix = model.state_dict(), model.base_model_prefix
    found = {}
    for name in sorted(stored):
        target, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:
            target, pattern = rename_source_key(name, [], [], prefix, state)
        found[name] = Target(target, target in state, target in state and pattern is None)
    if getattr(model, "_weight_conversions", None) is None:
        model._weight_conversions = [one for one in mapping if one.was_used()]  # type: ignore[assignment]
    return found


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


def stored_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Read the shapes of the tensors in a directory's safetensors files from their headers, by name."""
    from safetensors import safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    for file in weight_files(path):
        with safe_open(str(file), framework="np") as tensors:
            shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    return shapes


def _indexed(path: Path) -> dict[str, str]:
    files: dict[str, str] = json.loads((path / INDEX).read_text())["weight_map"]
    return files
