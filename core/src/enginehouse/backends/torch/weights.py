"""A replicated model's weights under the names and in the form its Hugging Face checkpoint has."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from enginehouse.engines.weights import ParamMeta

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ReplicatedWeights:
    """The `WeightSource` of a model that every rank holds whole.

    The tensors are the live ones, detached: a reader that keeps them past the next optimizer step must copy.

    Args:
        model: the model.
        stored: names in the checkpoint it was loaded from; decide under which of its names a tied parameter goes.
    """

    def __init__(self, model: PreTrainedModel, stored: frozenset[str]):
        self._model = model
        self._stored = stored

    def metadata(self) -> list[ParamMeta]:
        """All parameters and persistent buffers, tied ones once."""
        return [ParamMeta(name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in self.iter_local()]

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each tensor; needs no communication, as every rank holds the whole."""
        return self.iter_local()

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each tensor."""
        state = unique_state(self._model, self._stored)
        if getattr(self._model, "_weight_conversions", None):
            # transformers keeps some layers (experts) fused and stores them apart.
            from transformers.core_model_loading import revert_weight_conversion

            with torch.no_grad():
                state = revert_weight_conversion(self._model, state)
        yield from state.items()


def unique_state(model: torch.nn.Module, preferred: frozenset[str] = frozenset()) -> dict[str, torch.Tensor]:
    """The model's state dict, detached, tied parameters once: under the first name in `preferred`, or the first."""
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        known = names.get(id(parameter))
        if known is None or (known not in preferred and name in preferred):
            names[id(parameter)] = name
    kept = set(names.values())
    dropped = {name for name, _ in model.named_parameters(remove_duplicate=False)} - kept
    return {name: tensor.detach() for name, tensor in model.state_dict().items() if name not in dropped}


def stored_names(path: Path) -> frozenset[str]:
    """Names of the tensors in a directory's safetensors files; empty where there are none."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        return frozenset(json.loads(index.read_text())["weight_map"])
    from safetensors import safe_open

    names: set[str] = set()
    for file in path.glob("*.safetensors"):
        with safe_open(str(file), framework="pt") as tensors:
            names.update(tensors.keys())
    return frozenset(names)
