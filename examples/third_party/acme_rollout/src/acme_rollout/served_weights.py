"""The served weights, and a new version beside them."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from enginehouse.engines import HostMemory, WeightState, WeightUpdate
from enginehouse.weights import ModelForm, StagedUpdate, checksum, stored_names, tied_names, unique_state


class Staged:
    """Copies of a version's parameters. They are copied, because the memory of a chunk is used again."""

    def __init__(self, number: int, parameters: Collection[str]):
        self.number = number
        self.parameters = parameters
        self.arrived: dict[str, torch.Tensor] = {}

    def take(self, name: str, tensor: torch.Tensor, arrived_sum: str | None, memory: HostMemory | None) -> None:
        """Keep a parameter."""
        self.arrived[name] = tensor.detach().clone()


class ServedWeights(StagedUpdate[Staged]):
    """A model's weights by their names in the checkpoint. Tied weights occur once.

    Args:
        model: the model; only `switch` writes to its tensors.
        path: the directory that it was loaded from.
        where: description of this replica, for messages.
    """

    def __init__(self, model: Any, path: str, where: str):
        super().__init__(where)
        stored = stored_names(Path(path))
        self._tensors = unique_state(model, stored)
        self._form = ModelForm.of_tensors(self._tensors, tied_names(model, stored))

    def _model_form(self) -> ModelForm:
        return self._form

    def _begun(self, update: WeightUpdate) -> Staged:
        return Staged(update.version, {parameter.name for parameter in update.parameters})

    def switch(self, version: int) -> None:
        """Serve the staged weights as `version`. Do not call it while the model runs.

        Raises:
            WeightSyncError: another version was started, or a parameter is missing; the old one is still served.
        """
        staged = self._complete(version)
        with torch.no_grad():
            for name, tensor in self._tensors.items():
                tensor.copy_(staged.arrived[name])
        self.version = version
        self.discard()

    def state(self) -> WeightState:
        """Return the version, and a checksum of each parameter as the model reads it."""
        return WeightState(self.version, {name: checksum(tensor) for name, tensor in self._tensors.items()})
