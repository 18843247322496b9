"""Base classes of transports, and of the sending and receiving sides of a connection."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from enginehouse.engines.weights import (
    ListeningSession,
    ParamMeta,
    PartsSession,
    TransferPlan,
    TransportSession,
    WeightChunk,
    WeightSource,
)
from enginehouse.weights.buckets import drain, plan_transfer
from enginehouse.weights.transports.deadline import Deadline

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


class BucketTransport:
    """Base class of transports of whole parameters in buckets.

    Attributes:
        name: name of the transport in its plans.
        passes_references: True if both ends have the same tensors, so that either may compute a `mixed_checksum`.
    """

    name: str
    passes_references: bool = False

    def prepare(
        self, parameters: Sequence[ParamMeta], receivers: int, session: str, bucket_bytes: int, senders: int = 1
    ) -> TransferPlan:
        """Plan a transfer; see `WeightTransport`."""
        return plan_transfer(self.name, parameters, receivers, session, bucket_bytes, senders)


class Sender(ABC):
    """Base class of the sending side. It always exhausts the weights, because other ranks gather them together with
    this rank. A failed `send` aborts the update."""

    def send(
        self, version: int, weights: Iterable[tuple[str, torch.Tensor]], deadline_seconds: float
    ) -> dict[str, str]:
        """Send weights; see `TransportSession`."""
        deadline = Deadline(deadline_seconds)
        with drain(_note_each(iter(weights), deadline)) as source:
            try:
                return self._send(version, source, deadline)
            except BaseException:
                self.abort(version)
                raise

    @abstractmethod
    def _send(self, version: int, source: Iterator[tuple[str, torch.Tensor]], deadline: Deadline) -> dict[str, str]:
        """Send the weights of `source`, and return their checksums."""

    def recv(self, version: int, deadline_seconds: float) -> Iterator[WeightChunk]:
        """Raise an error, because a sender does not receive."""
        raise TypeError("a training rank does not receive weights")

    @abstractmethod
    def abort(self, version: int) -> None:
        """Abort an update; see `TransportSession`."""


class IdleSender(Sender):
    """The side of a training rank that sends nothing, and only helps to gather parameters."""

    def _send(self, version: int, source: Iterator[tuple[str, torch.Tensor]], deadline: Deadline) -> dict[str, str]:
        return {}

    def abort(self, version: int) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""


class Receiver(ABC):
    """Base class of the receiving side. It aborts the update if `recv` fails, or the caller stops iterating early."""

    def send(
        self, version: int, weights: Iterable[tuple[str, torch.Tensor]], deadline_seconds: float
    ) -> dict[str, str]:
        """Raise an error, because a receiver does not send."""
        raise TypeError("a rollout replica does not send weights")

    def recv(self, version: int, deadline_seconds: float) -> Iterator[WeightChunk]:
        """Yield chunks; see `TransportSession`."""
        deadline = Deadline(deadline_seconds)
        try:
            yield from _note_each(self._recv(version, deadline), deadline)
        except BaseException:  # also GeneratorExit, if the caller stops early
            self.abort(version)
            raise

    @abstractmethod
    def _recv(self, version: int, deadline: Deadline) -> Iterator[WeightChunk]:
        """Yield the chunks that arrive."""

    @abstractmethod
    def abort(self, version: int) -> None:
        """Abort an update; see `TransportSession`."""


def _note_each(items: Iterator[T], deadline: Deadline) -> Iterator[T]:
    """Yield the items of an update. Each request for the next item is progress, which restarts the deadline."""
    for item in items:
        yield item
        deadline.restart()


def address_of(session: TransportSession, host: str) -> str:
    """Return the `host:port` at which receivers reach a sender; empty if the sender accepts no connections."""
    return f"{host}:{session.port}" if isinstance(session, ListeningSession) else ""


def weights_for(session: TransportSession, source: WeightSource) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the weights that a sender sends: whole parameters, or the rank's parts if the transport sends parts."""
    if isinstance(session, PartsSession) and session.sends_parts:
        return source.iter_local()
    return source.iter_full()
