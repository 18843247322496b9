"""Names a model's tensors as its Hugging Face checkpoint does, with tied tensors once."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enginehouse.errors import ModelError, describe_os_error

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


def unique_state(model: torch.nn.Module, preferred: frozenset[str] = frozenset()) -> dict[str, torch.Tensor]:
    """Return a detached state dict that lists each tied parameter once.

    If some of the parameter's names are in `preferred`, the dict uses the first of these. Otherwise it uses the
    parameter's first name.
    """
    further = tied_names(model, preferred)
    return {name: tensor.detach() for name, tensor in model.state_dict().items() if name not in further}


def tied_names(model: torch.nn.Module, preferred: frozenset[str] = frozenset()) -> frozenset[str]:
    """Return the further names of tied parameters, which `unique_state` leaves out."""
    named = list(model.named_parameters(remove_duplicate=False))
    first_names: dict[int, str] = {}
    for name, parameter in named:
        first_name = first_names.get(id(parameter))
        if first_name is None or (first_name not in preferred and name in preferred):
            first_names[id(parameter)] = name
    return frozenset(name for name, _ in named) - set(first_names.values())


@dataclass(frozen=True, slots=True)
class Target:
    """The place of a stored tensor in a model.

    Attributes:
        name: name of the model's tensor that contains the stored tensor, even if the model lacks a tensor of that name.
        is_read: True if the model has a tensor of that name.
        is_whole: True if the stored tensor is the model's tensor, unchanged.
    """

    name: str
    is_read: bool
    is_whole: bool


def match_names(model: PreTrainedModel, stored: Iterable[str]) -> dict[str, Target]:
    """Find each stored tensor's place as transformers does when it loads a model: with the mapping of names that the
    model's class declares.

    If transformers did not load the model, this function stores the used parts of the mapping in the model, so that a
    save restores all names.

    Args:
        model: model on any device, also on the meta device.
        stored: names in the checkpoint.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [rule for rule in mapping if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in mapping if isinstance(rule, WeightConverter)]
    state, prefix = model.state_dict(), model.base_model_prefix
    targets = {}
    for name in sorted(stored):
        target, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:
            target, pattern = rename_source_key(name, [], [], prefix, state)
        targets[name] = Target(target, target in state, target in state and pattern is None)
    if getattr(model, "_weight_conversions", None) is None:
        model._weight_conversions = [rule for rule in mapping if rule.was_used()]  # type: ignore[assignment]
    return targets


INDEX = "model.safetensors.index.json"
_GIT_LFS, _LONGEST_POINTER = b"version https://git-lfs", 1024
"""First bytes of a pointer file of Git LFS, and a size in bytes that no pointer file reaches."""


def weight_files(path: Path) -> list[Path]:
    """List the safetensors files of a model directory that transformers reads.

    Returns:
        `model.safetensors` if it exists, else the files that the index names, else all safetensors files. Other files
        may hold the same weights again, under other names.
    """
    if (single_file := path / "model.safetensors").is_file():
        return [single_file]
    if (path / INDEX).is_file():
        return sorted({path / file for file in _read_index(path).values()})
    return sorted(path.glob("*.safetensors"))


def stored_names(path: Path) -> frozenset[str]:
    """Return the names of the tensors in a directory's safetensors files; empty if there are none.

    Raises:
        ModelError: if a file is damaged.
    """
    files = weight_files(path)
    if (path / INDEX).is_file() and path / "model.safetensors" not in files:
        return frozenset(_read_index(path))
    names: set[str] = set()
    for file in files:
        with _open_weights(file) as tensors:
            names.update(tensors.keys())
    return frozenset(names)


def stored_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Read the shapes of the tensors in a directory's safetensors files from the headers, by name. Raises `ModelError`
    if a file is damaged."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in weight_files(path):
        with _open_weights(file) as tensors:
            shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    return shapes


def _open_weights(file: Path) -> Any:
    """Open a safetensors file, and read only its header. Raise a `ModelError` if it is damaged or unreadable."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(str(file), framework="np")
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {describe_os_error(error)}") from error
    except SafetensorError as error:
        is_pointer = file.stat().st_size < _LONGEST_POINTER and file.read_bytes().startswith(_GIT_LFS)
        pointer = "it is a pointer file of Git LFS, and `git lfs pull` downloads the weights"
        cure = pointer if is_pointer else "download it again"
        raise ModelError(f"{file} is not a complete safetensors file ({error}): {cure}") from error


def _read_index(path: Path) -> dict[str, str]:
    files: dict[str, str] = json.loads((path / INDEX).read_text())["weight_map"]
    return files
