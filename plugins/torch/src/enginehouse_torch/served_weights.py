"""The weights that a rollout engine serves: a new version is staged beside the old one, then replaces it."""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from enginehouse.engines.storages import give_back_freed_memory, give_up, take_back
from enginehouse.engines.weights import HostMemory, WeightState, WeightUpdate
from enginehouse.weights.checksums import checksum
from enginehouse.weights.form import ModelForm
from enginehouse.weights.names import stored_names, tied_names, unique_state
from enginehouse.weights.staged_update import StagedUpdate
from enginehouse_torch.modeling.offloading import storages
from enginehouse_torch.modeling.sizes import LITTLE_BYTES
from enginehouse_torch.modeling.stored import StoredForm

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class StagedTensors:
    """A staged version `number` as tensors on the model's device, which replaces the `served` ones.

    Attributes:
        parameters: names of the announced parameters.
        room: tensors to write to, by name; missing ones are allocated.
        arrived: the tensors that have arrived.
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
    """A model's parameters and persistent buffers by Hugging Face name, and their version.

    A tied parameter has one name here, that of the checkpoint, so that the tie holds after every update. Only `commit`
    overwrites the model's tensors, in place.

    Attributes:
        is_lost: True from `forget` until an update has brought new weights.
        are_large: True if memory of their size is worth giving back between calls, as it is on a CPU alone.
    """

    def __init__(self, model: PreTrainedModel, path: str, where: str):
        super().__init__(where)
        stored = stored_names(Path(path))
        state = unique_state(model, stored)
        self._parameters = dict(StoredForm.of(model, stored).apart(state))  # views, written to in place
        self._form = ModelForm.of_tensors(self._parameters, tied_names(model, stored))
        self._on_cpu = model.device.type == "cpu"
        nbytes = sum(tensor.nbytes for tensor in self._parameters.values())
        self.are_large = self._on_cpu and nbytes > LITTLE_BYTES
        # Staging memory kept between updates on a CPU, where fresh memory is five times as slow, unless it is large.
        self._room: dict[str, torch.Tensor] = {}
        self._checksums: dict[str, str] = {}
        self._device = model.device
        self.is_lost = False

    def forget(self) -> None:
        """Free the memory of the served weights, which are lost."""
        self.discard()
        self._room, self._checksums, self.is_lost = {}, {}, True
        memory = storages(self._parameters.values(), self._device).values()
        self._sizes = [(storage, storage.nbytes()) for storage in memory]
        for storage in memory:
            give_up(storage)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def make_room(self) -> None:
        """Allocate the memory again; the next update fills it."""
        for storage, nbytes in self._sizes:
            take_back(storage, nbytes)

    def _model_form(self) -> ModelForm:
        return self._form

    def _begun(self, update: WeightUpdate) -> StagedTensors:
        room, self._room = self._room, {}
        return StagedTensors(update.version, {meta.name for meta in update.parameters}, self._parameters, room)

    def commit(self, version: int) -> None:
        """Serve the staged weights as `version`. Must not be called during a forward pass.

        Raises:
            WeightSyncError: no update or another version was started, or a parameter is missing. The old version keeps
                serving, and the staged tensors stay until the update is aborted or another one starts.
        """
        staged = self._complete(version)
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(staged.arrived[name])
        self.version, self.is_lost = version, False
        self._checksums = {}
        self.discard()
        if self.are_large:
            del staged
            give_back_freed_memory()
        elif self._on_cpu:
            self._room = staged.room

    def state(self) -> WeightState:
        """Return the version, and checksums of the parameters that the forward pass reads; neither if they are lost."""
        if self.is_lost:
            return WeightState(None)
        if not self._checksums:
            self._checksums = {name: checksum(parameter) for name, parameter in self._parameters.items()}
        return WeightState(self.version, dict(self._checksums))
