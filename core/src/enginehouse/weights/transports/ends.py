"""What the ends of a connection have in common: those that send, and those that receive."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from enginehouse.engines.weights import ListeningSession, PartsSession, TransportSession, WeightChunk, WeightSource
from enginehouse.weights.buckets import exhausted
from enginehouse.weights.transports.deadline import Deadline

if TYPE_CHECKING:
    import torch


class Sender(ABC):
    """Takes part in gathering each parameter to its end, whatever happens; a send that fails ends the update."""

    def send(
        self, version: int, weights: Iterable[tuple[str, torch.Tensor]], deadline_seconds: float
    ) -> dict[str, str]:
        """See `TransportSession`."""
        deadline = Deadline(deadline_seconds)
        with exhausted(weights) as source:
            try:
                return self._send(version, source, deadline)
            except BaseException:
                self.abort(version)
                raise

    @abstractmethod
    def _send(self, version: int, source: Iterator[tuple[str, torch.Tensor]], deadline: Deadline) -> dict[str, str]:
        """Send what `source` yields; returns the checksums."""

    def recv(self, version: int, deadline_seconds: float) -> Iterator[WeightChunk]:
        """Not for a sender's end."""
        raise TypeError("a training rank does not receive weights")

    @abstractmethod
    def abort(self, version: int) -> None:
        """See `TransportSession`."""


class IdleSender(Sender):
    """The end of a training rank that sends nothing: it drops each parameter it helped to gather."""

    def _send(self, version: int, source: Iterator[tuple[str, torch.Tensor]], deadline: Deadline) -> dict[str, str]:
        return {}

    def abort(self, version: int) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""


class Receiver(ABC):
    """A receive that fails, or is given up before its end, ends the update for those that send."""

    def send(
        self, version: int, weights: Iterable[tuple[str, torch.Tensor]], deadline_seconds: float
    ) -> dict[str, str]:
        """Not for a receiver's end."""
        raise TypeError("a rollout replica does not send weights")

    def recv(self, version: int, deadline_seconds: float) -> Iterator[WeightChunk]:
        """See `TransportSession`."""
        deadline = Deadline(deadline_seconds)
        try:
            yield from self._recv(version, deadline)
        except BaseException:  # GeneratorExit too: a receiver that stops early
            self.abort(version)
            raise

    @abstractmethod
    def _recv(self, version: int, deadline: Deadline) -> Iterator[WeightChunk]:
        """Yield what arrives."""

    @abstractmethod
    def abort(self, version: int) -> None:
        """See `TransportSession`."""


def address_of(session: TransportSession, host: str) -> str:
    """Where receivers reach a sender's end on a host, as `host:port`; empty where it waits for no connection."""
    return f"{host}:{session.port}" if isinstance(session, ListeningSession) else ""


def weights_for(session: TransportSession, source: WeightSource) -> Iterator[tuple[str, torch.Tensor]]:
    """What a training rank gives a sender's end: whole parameters, or its own parts where the transport sends these."""
    if isinstance(session, PartsSession) and session.sends_parts:
        return source.iter_local()
    return source.iter_full()
