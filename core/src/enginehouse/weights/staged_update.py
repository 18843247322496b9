"""Stages a new version of the weights beside the served version, and checks it before it is served."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Container
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from enginehouse.engines.weights import HostMemory, WeightChunk, WeightSyncError, WeightUpdate
from enginehouse.errors import listed

if TYPE_CHECKING:
    import torch

    from enginehouse.weights.form import ModelForm


class StagedVersion(Protocol):
    """A version of which some parameters have arrived.

    Attributes:
        number: number of the version.
        parameters: names of the announced parameters.
        arrived: names of the parameters that have arrived.
    """

    number: int

    @property
    def parameters(self) -> Collection[str]: ...

    @property
    def arrived(self) -> Container[str]: ...

    def take(self, name: str, tensor: torch.Tensor, arrived_sum: str | None, memory: HostMemory | None) -> None:
        """Keep a parameter's tensor. Checksum and memory are those of its `WeightChunk`."""
        ...


V = TypeVar("V", bound=StagedVersion)


class StagedUpdate(ABC, Generic[V]):
    """The steps of an update before the switch. A failed update does not change the served weights.

    Args:
        where: name of this replica in messages.

    Attributes:
        version: the served version.
    """

    def __init__(self, where: str):
        self._where = where
        self._staged: V | None = None
        self.version = 0

    @abstractmethod
    def _model_form(self) -> ModelForm:
        """Return the names, shapes and dtypes of the model's weights."""

    @abstractmethod
    def _begun(self, update: WeightUpdate) -> V:
        """Return a new version, without arrived parameters."""

    def start(self, update: WeightUpdate) -> None:
        """Prepare to stage `update`, and drop an earlier unfinished update.

        Raises:
            WeightSyncError: if the version is not newer, the model lacks a parameter of the update, or an adapter lacks
                the other matrix of a layer.
        """
        self.discard()
        if update.version <= self.version:
            raise WeightSyncError(f"{self._where} serves version {self.version}; version {update.version} is not newer")
        for meta in update.parameters:
            self._check_parameter(meta.name, tuple(meta.shape), meta.dtype)
        if self._model_form().is_adapter:
            self._check_pairs([meta.name for meta in update.parameters])
        self._staged = self._begun(update)

    def stage(self, chunk: WeightChunk) -> None:
        """Keep a chunk's tensors beside the served tensors.

        Raises:
            WeightSyncError: if no update was started, a name is unknown, a shape or dtype is wrong, or memory is too
                small.
        """
        staged = self._staged  # kept in a local, because a new update may start during an abort
        if staged is None:
            raise WeightSyncError(f"{self._where} was sent weights, but no weight update was started")
        for name, tensor in chunk.tensors:
            self._check_parameter(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            if name not in staged.parameters:
                raise WeightSyncError(f"{self._where} was sent {name!r}, which was not announced", parameters=[name])
            staged.take(name, tensor, chunk.checksums.get(name), chunk.memory)

    def _complete(self, version: int) -> V:
        """Return the staged version.

        Raises:
            WeightSyncError: if another version or none was started, or a parameter is missing. Staged tensors are kept
                until `discard` or another `start`.
        """
        staged = self._staged
        if staged is None or staged.number != version:
            begun = "none was started" if staged is None else f"version {staged.number} was started"
            raise WeightSyncError(f"{self._where} cannot finish the weight update to version {version}: {begun}")
        form = self._model_form()
        needed = staged.parameters if form.is_adapter else form.parameters
        missing = [name for name in needed if name not in staged.arrived]
        if missing:
            raise WeightSyncError(
                f"weight update to version {version} at {self._where} lacks {listed(missing)}; "
                f"version {self.version} keeps serving",
                parameters=missing,
            )
        return staged

    def discard(self) -> None:
        """Drop the staged tensors. Their memory is not used again, because a thread may still write to it."""
        self._staged = None

    def _check_pairs(self, names: Collection[str]) -> None:
        """Check that A and B of each adapted layer are announced."""
        if not names:
            raise WeightSyncError(f"{self._where} was announced an adapter without matrices")
        other = {"lora_A": "lora_B", "lora_B": "lora_A"}
        wanted = {re.sub(r"lora_[AB](?=\.weight$)", lambda found: other[found[0]], name) for name in names}
        if missing := sorted(wanted.difference(names)):
            raise WeightSyncError(f"{self._where} was announced an adapter that lacks {listed(missing)}", missing)

    def _check_parameter(self, name: str, shape: tuple[int, ...], dtype: str) -> None:
        form = self._model_form()
        expected = form.parameters.get(name)
        if expected is None:
            reason = " (it is tied to another parameter; send only that parameter)" if name in form.tied else ""
            raise WeightSyncError(f"{self._where} has no parameter {name!r}{reason}", parameters=[name])
        if expected != (shape, dtype):
            raise WeightSyncError(
                f"parameter {name!r} was sent to {self._where} as {dtype} {shape}, "
                f"but the model there has {expected[1]} {expected[0]}",
                parameters=[name],
            )
