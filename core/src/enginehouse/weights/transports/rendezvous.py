"""Connects a sender with its receivers, waits for all of them, and records the buckets that each receiver has taken.

Messages over each connection (`ControlChannel`) report the beginning of an update, the number of taken buckets, an
abort, and what else a transport needs. A broken connection means that the process on the other side died.
"""

from __future__ import annotations

import collections
import hashlib
import hmac
import logging
import socket
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

from enginehouse.engines.weights import TransferPlan, WeightSyncError
from enginehouse.weights.transports.barrier import Barrier
from enginehouse.weights.transports.control_channel import ControlChannel
from enginehouse.weights.transports.deadline import Deadline

log = logging.getLogger(__name__)

GREETING_SECONDS = 15.0
"""Time limit for connecting, and for the greeting of the other side."""

STRANGERS = 16
"""Number of unexpected connections that may await their greeting at once. If there are more, the oldest is closed."""

PAUSE_SECONDS = 0.2
"""Pause after a connection could not be accepted."""


class Rendezvous:
    """A sender's connections to its receivers.

    Args:
        receivers: numbers of the receivers to accept, each once.
        on_message: called, holding `barrier.changed`, with a receiver's number and each message that does not report
            taken buckets or an abort.
        streams: True if each receiver makes a second connection, for bytes.

    Attributes:
        port: port to which receivers connect, at the plan's `host`.
        streams: connections for bytes, by receiver.
    """

    def __init__(
        self,
        barrier: Barrier,
        plan: TransferPlan,
        receivers: Collection[int],
        on_message: Callable[[int, dict[str, Any]], None],
        streams: bool = False,
    ):
        self._barrier = barrier
        self._secret = secret(plan.session)
        self._buckets = len(plan.buckets)
        self._receivers = frozenset(receivers)
        self._on_other_message = on_message
        self._with_streams = streams
        self.channels: dict[int, ControlChannel] = {}
        self.streams: dict[int, socket.socket] = {}
        self._gone: list[int] = []  # receivers whose connections have ended
        self._taken: dict[int, tuple[int, int]] = {}  # version and number of its taken buckets, by receiver
        self._greeting: collections.deque[ControlChannel] = collections.deque()  # not accepted yet, the oldest first
        self._listener = _listen(plan.host)
        self._address = self._listener.getsockname()[:2]
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="weights-accept", daemon=True).start()

    def _accept(self) -> None:
        with self._listener:
            while not self._barrier.broken and not self._all_there():
                try:
                    channel = ControlChannel(self._listener.accept()[0])
                except OSError as error:  # for example too many open files
                    if self._barrier.broken or self._all_there():
                        break
                    log.warning("a rollout replica's connection could not be accepted: %s", error)
                    time.sleep(PAUSE_SECONDS)
                    continue
                self._greeting.append(channel)
                if len(self._greeting) > STRANGERS + 2 * len(self._receivers):
                    self._greeting.popleft().close()
                threading.Thread(target=self._greet, args=(channel,), name="weights-greet", daemon=True).start()

    def _greet(self, channel: ControlChannel) -> None:
        """Accept a receiver of this session. No part of a greeting is parsed before its secret is compared."""
        right = hmac.compare_digest(channel.receive_bytes(len(self._secret), GREETING_SECONDS), self._secret)
        greeting = (channel.receive(GREETING_SECONDS) if right else None) or {}
        with suppress(ValueError):  # it was closed as the oldest connection
            self._greeting.remove(channel)
        index = greeting.get("receiver")
        if not isinstance(index, int) or index not in self._receivers:
            channel.close()
            return
        stream = self._with_streams and "stream" in greeting
        barrier = self._barrier
        with barrier.changed:
            refused = index in self.streams or index not in self.channels if stream else index in self.channels
            if refused or barrier.broken:
                channel.close()
                return
            if stream:
                self.streams[index] = channel.release()
            else:
                self.channels[index] = channel
                self._taken[index] = (-1, 0)
                channel.send({"aborted": barrier.aborted})
            barrier.changed.notify_all()
        if self._all_there():
            self._stop_listening()
        if not stream:
            channel.listen(lambda message: self._on_message(index, message), lambda: self.lost(index))

    def _stop_listening(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
            return
        with suppress(OSError):  # on systems where that does not wake `accept`
            socket.create_connection(self._address, GREETING_SECONDS).close()

    def _on_message(self, index: int, message: dict[str, Any]) -> None:
        with self._barrier.changed:
            if "aborted" in message:
                self.abort(message["aborted"])
            elif "taken" in message:
                self._taken[index] = (message["version"], message["taken"])
                self._barrier.changed.notify_all()
                if message["taken"] == self._buckets:
                    self.channels[index].send({"noted": message["version"]})
            else:
                self._on_other_message(index, message)

    def lost(self, index: int) -> None:
        """Record that a receiver is lost, and stop the update unless the receiver has taken everything."""
        with self._barrier.changed:
            self._gone.append(index)
            if self._taken[index] < (self._barrier.begun, self._buckets):
                self._break_off()

    def _break_off(self) -> None:
        lost = ", ".join(map(str, sorted(set(self._gone))))
        self._barrier.close(f"rollout replica {lost} is gone, or closed the connection")

    def begin(self, version: int, deadline: Deadline) -> None:
        """Make `version` the newest update, and wait until all receivers are connected.

        Raises:
            WeightSyncError: see `Barrier.begin` and `Barrier.wait`.
        """
        barrier = self._barrier
        with barrier.changed:
            if self._gone:
                self._break_off()
            barrier.begin(version)
            barrier.wait(self._all_there, version, deadline, self._absent)

    def _all_there(self) -> bool:
        count = len(self._receivers)
        return len(self.channels) == count and len(self.streams) == (count if self._with_streams else 0)

    def _absent(self) -> str:
        absent = [str(index) for index in sorted(self._receivers) if index not in self.channels]
        return f"rollout replica {', '.join(absent)} did not connect"

    def behind(self, version: int, buckets: int) -> list[str]:
        """Return the receivers that have taken fewer than `buckets` buckets of an update."""
        return [str(index) for index, taken in sorted(self._taken.items()) if taken < (version, buckets)]

    def missing(self, version: int, buckets: int) -> str:
        """Describe which receivers are behind."""
        late = ", ".join(self.behind(version, buckets))
        return f"rollout replica {late} did not take bucket {buckets} of {self._buckets}"

    def send_all(self, message: dict[str, Any]) -> None:
        for channel in self.channels.values():
            channel.send(message)

    def abort(self, version: int) -> None:
        """Abort updates up to `version`, and tell the receivers. The caller holds `barrier.changed`."""
        if version > self._barrier.aborted:
            self._barrier.abort(version)
            self.send_all({"aborted": version})

    def close(self) -> None:
        self._barrier.close()
        for channel in list(self.channels.values()):
            channel.close()
        for stream in list(self.streams.values()):
            with suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)
            stream.close()
        self._stop_listening()


def join(plan: TransferPlan, index: int, rank: int) -> tuple[ControlChannel, int]:
    """Connect a receiver to a training rank. Return the channel, and the version up to which the rank has aborted
    updates. Raises `WeightSyncError` if no sender of this session answers at the rank's address."""
    address = plan.address(rank)
    channel = ControlChannel(_connect(plan, index, rank))
    channel.send({"receiver": index}, after=secret(plan.session))
    welcome = channel.receive(GREETING_SECONDS)
    if welcome is None:
        channel.close()
        raise WeightSyncError(
            f"the process at {address} did not accept rollout replica {index}: it is not training rank {rank} of this "
            f"session, or is connected with a replica {index} already"
        )
    return channel, welcome["aborted"]


def join_stream(plan: TransferPlan, index: int, rank: int) -> socket.socket:
    """Make a second connection, for the weights' bytes, of a receiver that has joined.

    Raises:
        WeightSyncError: see `join`.
    """
    channel = ControlChannel(_connect(plan, index, rank))
    channel.send({"receiver": index, "stream": True}, after=secret(plan.session))
    return channel.release()


def _connect(plan: TransferPlan, index: int, rank: int) -> socket.socket:
    address = plan.address(rank)
    host, _, port = address.rpartition(":")
    try:
        return socket.create_connection((host, int(port)), GREETING_SECONDS)
    except (OSError, ValueError) as error:
        raise WeightSyncError(
            f"rollout replica {index} cannot connect to training rank {rank} at {address!r}: {error}. "
            f"Transport {plan.transport!r} needs hosts that reach each other, on any port."
        ) from error


def secret(session: str) -> bytes:
    """Return the greeting's first bytes. Their length is fixed, so that nothing from an unknown process is parsed."""
    return hashlib.sha256(session.encode()).digest()


def _listen(host: str) -> socket.socket:
    """Return a socket that listens on a free port of one address."""
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address[:2], family=family)
