"""The weights a rollout engine serves: staging a new version beside the old one, and checksums of what is served."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from enginehouse.engines.weights import WeightChunk, WeightState, WeightSyncError, WeightUpdate
from enginehouse.weights.checksums import checksum
from enginehouse.weights.names import stored_names, unique_state
from enginehouse_torch.modeling.stored import StoredForm

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ServedWeights:
    """A model's parameters and persistent buffers by Hugging Face name, and the version they are.

    A tied parameter has one name here, the one it has in the checkpoint, so that the tie holds whatever is staged.

    Args:
        model: its tensors are overwritten in place by `commit`, and only there.
        path: directory it was loaded from.
        where: names this replica in messages.
    """

    def __init__(self, model: PreTrainedModel, path: str, where: str):
        stored = stored_names(Path(path))
        state = unique_state(model, stored)
        self._parameters = dict(StoredForm.of(model, stored).apart(state))  # views: written to in place
        self._tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - set(state)
        self._where = where
        self._on_cpu = model.device.type == "cpu"
        self._staged: dict[str, torch.Tensor] = {}
        self._room: dict[str, torch.Tensor] = {}  # on a CPU, where fresh memory is five times as slow: kept for staging
        self._announced: int | None = None
        self._checksums: dict[str, str] = {}
        self.version = 0

    def start(self, update: WeightUpdate) -> None:
        """Be ready to stage `update`; what an earlier, unfinished one staged is thrown away.

        Raises:
            WeightSyncError: the version is not newer, or a parameter is not one of the model's.
        """
        if self._announced is not None:
            self.discard()
        if update.version <= self.version:
            raise WeightSyncError(f"{self._where} serves version {self.version}; version {update.version} is not newer")
        for meta in update.parameters:
            self._served(meta.name, tuple(meta.shape), meta.dtype)
        self._announced = update.version

    def stage(self, chunk: WeightChunk) -> None:
        """Copy a chunk's tensors to the device, beside what is served.

        Raises:
            WeightSyncError: no update was started; unknown name, wrong shape or dtype.
        """
        if self._announced is None:
            raise WeightSyncError(f"{self._where} was sent weights, but no weight update was started")
        staged, room = self._staged, self._room  # not those of an update started while this one is being given up
        for name, tensor in chunk.tensors:
            served = self._served(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            if name not in room:
                room[name] = torch.empty_like(served)
            staged[name] = room[name].copy_(tensor.detach())

    def commit(self, version: int) -> None:
        """Serve what was staged as `version`. Not while a forward pass runs.

        Raises:
            WeightSyncError: no update or another version was started, or a parameter is missing; the old version
                keeps serving, and what was staged is kept until it is aborted or another update starts.
        """
        if version != self._announced:
            begun = "none was started" if self._announced is None else f"version {self._announced} was started"
            raise WeightSyncError(f"{self._where} cannot finish the weight update to version {version}: {begun}")
        missing = [name for name in self._parameters if name not in self._staged]
        if missing:
            named = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            raise WeightSyncError(
                f"weight update to version {version} at {self._where} lacks {named}; "
                f"version {self.version} keeps serving",
                parameters=missing,
            )
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(self._staged[name])
        self.version = version
        self._checksums = {}
        room = self._room
        self.discard()
        if self._on_cpu:
            self._room = room

    def discard(self) -> None:
        """Throw away what was staged. A thread may still be staging it: its memory is not used again."""
        self._staged = {}
        self._room = {}
        self._announced = None

    def state(self) -> WeightState:
        """Version and checksums of the parameters themselves, as the forward pass reads them."""
        if not self._checksums:
            self._checksums = {name: checksum(parameter) for name, parameter in self._parameters.items()}
        return WeightState(self.version, dict(self._checksums))

    def _served(self, name: str, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        parameter = self._parameters.get(name)
        if parameter is None:
            reason = " (it is tied to another, which must come alone)" if name in self._tied else ""
            raise WeightSyncError(f"{self._where} has no parameter {name!r}{reason}", parameters=[name])
        served_dtype = str(parameter.dtype).removeprefix("torch.")
        if (tuple(parameter.shape), served_dtype) != (shape, dtype):
            raise WeightSyncError(
                f"parameter {name!r} was sent to {self._where} as {dtype} {shape}, "
                f"but the model there has {served_dtype} {tuple(parameter.shape)}",
                parameters=[name],
            )
        return parameter
