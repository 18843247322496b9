"""The weights a rollout engine serves: staging a new version beside the old one, and checksums of what is served."""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from enginehouse.engines.storages import give_up, take_back
from enginehouse.engines.weights import HostMemory, WeightState, WeightUpdate
from enginehouse.weights.checksums import checksum
from enginehouse.weights.form import ModelForm
from enginehouse.weights.names import stored_names, tied_names, unique_state
from enginehouse.weights.staged_update import StagedUpdate
from enginehouse_torch.modeling.offloading import storages
from enginehouse_torch.modeling.stored import StoredForm

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class StagedTensors:
    """A version as tensors on the model's device.

    Args:
        number: what it is to be served as.
        parameters: names of the parameters that were announced.
        served: the tensors it is to replace, by name.
        room: tensors like them, to be written to; those that are missing are made.

    Attributes:
        arrived: those that have arrived.
    """

    def __init__(
        self,
        number: int,
        parameters: Container[str],
        served: dict[str, torch.Tensor],
        room: dict[str, torch.Tensor],
    ):
        self.number = number
        self.parameters = parameters
        self.arrived: dict[str, torch.Tensor] = {}
        self.room = room
        self._served = served

    def take(self, name: str, tensor: torch.Tensor, arrived_sum: str | None, memory: HostMemory | None) -> None:
        """Copy a parameter's tensor to the device."""
        if name not in self.room:
            self.room[name] = torch.empty_like(self._served[name])
        self.arrived[name] = self.room[name].copy_(tensor.detach())


class ServedWeights(StagedUpdate[StagedTensors]):
    """A model's parameters and persistent buffers by Hugging Face name, and the version they are.

    A tied parameter has one name here, the one it has in the checkpoint, so that the tie holds whatever is staged.

    Attributes:
        is_lost: whether there are no weights since `forget`: no update has brought any.

    Args:
        model: its tensors are overwritten in place by `commit`, and only there.
        path: directory it was loaded from.
        where: names this replica in messages.
    """

    def __init__(self, model: PreTrainedModel, path: str, where: str):
        super().__init__(where)
        stored = stored_names(Path(path))
        state = unique_state(model, stored)
        self._parameters = dict(StoredForm.of(model, stored).apart(state))  # views: written to in place
        self._form = ModelForm.of_tensors(self._parameters, tied_names(model, stored))
        self._on_cpu = model.device.type == "cpu"
        self._room: dict[str, torch.Tensor] = {}  # on a CPU, where fresh memory is five times as slow: kept for staging
        self._checksums: dict[str, str] = {}
        self._device = model.device
        self.is_lost = False

    def forget(self) -> None:
        """Give up the memory of what is served, which is lost."""
        self.discard()
        self._room, self._checksums, self.is_lost = {}, {}, True
        held = storages(self._parameters.values(), self._device).values()
        self._sizes = [(storage, storage.nbytes()) for storage in held]
        for storage in held:
            give_up(storage)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def make_room(self) -> None:
        """Take the memory back; what is in it comes by an update."""
        for storage, nbytes in self._sizes:
            take_back(storage, nbytes)

    def _model_form(self) -> ModelForm:
        return self._form

    def _begun(self, update: WeightUpdate) -> StagedTensors:
        room, self._room = self._room, {}
        return StagedTensors(update.version, {meta.name for meta in update.parameters}, self._parameters, room)

    def commit(self, version: int) -> None:
        """Serve what was staged as `version`. Not while a forward pass runs.

        Raises:
            WeightSyncError: no update or another version was started, or a parameter is missing; the old version
                keeps serving, and what was staged is kept until it is aborted or another update starts.
        """
        staged = self._complete(version)
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(staged.arrived[name])
        self.version, self.is_lost = version, False
        self._checksums = {}
        self.discard()
        if self._on_cpu:
            self._room = staged.room

    def state(self) -> WeightState:
        """Version and checksums of the parameters themselves, as the forward pass reads them; no version and none where
        they are lost."""
        if self.is_lost:
            return WeightState(None)
        if not self._checksums:
            self._checksums = {name: checksum(parameter) for name, parameter in self._parameters.items()}
        return WeightState(self.version, dict(self._checksums))
