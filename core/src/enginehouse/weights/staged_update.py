"""A new version of the weights beside the one that is served: what it must be to be staged, and to be served."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from enginehouse.engines.weights import HostMemory, WeightChunk, WeightSyncError, WeightUpdate
from enginehouse.errors import listed

if TYPE_CHECKING:
    import torch

    from enginehouse.weights.form import ModelForm


class StagedVersion(Protocol):
    """What has arrived of a version.

    Attributes:
        number: what it is to be served as.
        parameters: names of the parameters that were announced.
        arrived: names of those that have arrived.
    """

    number: int

    @property
    def parameters(self) -> Container[str]: ...

    @property
    def arrived(self) -> Container[str]: ...

    def take(self, name: str, tensor: torch.Tensor, arrived_sum: str | None, memory: HostMemory | None) -> None:
        """Keep a parameter's tensor, whose checksum and memory are those of its chunk (`WeightChunk`)."""
        ...


V = TypeVar("V", bound=StagedVersion)


class StagedUpdate(ABC, Generic[V]):
    """The steps of an update up to its switch. One that cannot be switched to leaves what is served as it is.

    Args:
        where: names this replica in messages.

    Attributes:
        version: the version served.
    """

    def __init__(self, where: str):
        self._where = where
        self._staged: V | None = None
        self.version = 0

    @abstractmethod
    def _model_form(self) -> ModelForm:
        """What the model's weights are."""

    @abstractmethod
    def _begun(self, update: WeightUpdate) -> V:
        """An update of which nothing has arrived yet."""

    def start(self, update: WeightUpdate) -> None:
        """Be ready to stage `update`; what an earlier, unfinished one staged is thrown away.

        Raises:
            WeightSyncError: the version is not newer, or a parameter is not one of the model's.
        """
        self.discard()
        if update.version <= self.version:
            raise WeightSyncError(f"{self._where} serves version {self.version}; version {update.version} is not newer")
        for meta in update.parameters:
            self._check_parameter(meta.name, tuple(meta.shape), meta.dtype)
        self._staged = self._begun(update)

    def stage(self, chunk: WeightChunk) -> None:
        """Keep a chunk's tensors beside what is served.

        Raises:
            WeightSyncError: no update was started; unknown name, wrong shape or dtype; there is not enough memory.
        """
        staged = self._staged  # not that of an update started while this one is being given up
        if staged is None:
            raise WeightSyncError(f"{self._where} was sent weights, but no weight update was started")
        for name, tensor in chunk.tensors:
            self._check_parameter(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            if name not in staged.parameters:
                raise WeightSyncError(f"{self._where} was sent {name!r}, which was not announced", parameters=[name])
            staged.take(name, tensor, chunk.checksums.get(name), chunk.memory)

    def _complete(self, version: int) -> V:
        """The staged version.

        Raises:
            WeightSyncError: another one, or none, was started, or a parameter is missing; what was staged is kept until
                it is discarded or another update starts.
        """
        staged = self._staged
        if staged is None or staged.number != version:
            begun = "none was started" if staged is None else f"version {staged.number} was started"
            raise WeightSyncError(f"{self._where} cannot finish the weight update to version {version}: {begun}")
        missing = [name for name in self._model_form().parameters if name not in staged.arrived]
        if missing:
            raise WeightSyncError(
                f"weight update to version {version} at {self._where} lacks {listed(missing)}; "
                f"version {self.version} keeps serving",
                parameters=missing,
            )
        return staged

    def discard(self) -> None:
        """Throw away what was staged. A thread may still be staging it: its memory is not used again."""
        self._staged = None

    def _check_parameter(self, name: str, shape: tuple[int, ...], dtype: str) -> None:
        form = self._model_form()
        known = form.parameters.get(name)
        if known is None:
            reason = " (it is tied to another, which must come alone)" if name in form.tied else ""
            raise WeightSyncError(f"{self._where} has no parameter {name!r}{reason}", parameters=[name])
        if known != (shape, dtype):
            raise WeightSyncError(
                f"parameter {name!r} was sent to {self._where} as {dtype} {shape}, "
                f"but the model there has {known[1]} {known[0]}",
                parameters=[name],
            )
