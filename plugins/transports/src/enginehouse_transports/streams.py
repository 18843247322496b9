"""Sends parts of parameters, each behind a heading, over a TCP connection with a thread on each side."""

from __future__ import annotations

import logging
import queue
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from enginehouse.weights.transports.barrier import Barrier

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

HEADING = struct.Struct("<qqqqq")

HEADING_BYTES = HEADING.size

WHOLE = -1
"""Base of a part whose bytes are all sent."""

DROPPED_BYTES = 1 << 20
"""Bytes to read at once of a part that is dropped."""


class Heading(NamedTuple):
    """Heading of a part: version and bucket of the update, number of the move in the plan, bytes that follow, and the
    version whose bytes they change, or `WHOLE`."""

    version: int
    bucket: int
    move: int
    nbytes: int
    base: int = WHOLE


class PartSender:
    """The sending side. Parts are written whole or not at all, even if their update has failed.

    Args:
        stream: the connection.
        barrier: barrier that records aborted updates, whose parts are not written.
        ended: called if the other side is closed.
    """

    def __init__(self, stream: socket.socket, barrier: Barrier, ended: Callable[[], None]):
        self._stream = stream
        self._barrier = barrier
        self._ended = ended
        self._waiting: queue.SimpleQueue[tuple[Heading, torch.Tensor] | None] = queue.SimpleQueue()
        threading.Thread(target=self._write, name="weights-part-sender", daemon=True).start()

    def put(self, heading: Heading, part: torch.Tensor) -> None:
        """Queue a part, contiguous in host memory, which must not change until its update ends."""
        self._waiting.put((heading, part))

    def _write(self) -> None:
        import torch

        try:
            while (item := self._waiting.get()) is not None:
                heading, part = item
                with self._barrier.changed:
                    if self._barrier.aborted >= heading.version:
                        continue
                self._stream.sendall(HEADING.pack(*heading))
                self._stream.sendall(part.reshape(-1).view(torch.uint8).numpy().data)
                del item, part
        except OSError:
            self._ended()

    def close(self) -> None:
        """End the thread; the caller closes the connection."""
        self._waiting.put(None)


class PartReceiver:
    """The receiving side, which reads at all times.

    Args:
        stream: the connection.
        room: returns the tensor, contiguous or not, for the bytes behind a heading; None: drop the bytes.
        arrived: called with a heading and the tensor of `room` when the tensor has the bytes behind the heading.
        ended: called once, at the connection's end.
    """

    def __init__(
        self,
        stream: socket.socket,
        room: Callable[[Heading], torch.Tensor | None],
        arrived: Callable[[Heading, torch.Tensor], None],
        ended: Callable[[], None],
    ):
        self._stream = stream
        self._room, self._arrived, self._ended = room, arrived, ended
        threading.Thread(target=self._read, name="weights-part-receiver", daemon=True).start()

    def _read(self) -> None:
        heading_bytes = bytearray(HEADING_BYTES)
        try:
            while self._fill(memoryview(heading_bytes)):
                heading = Heading(*HEADING.unpack(heading_bytes))
                target = self._room(heading)
                if not (self._drop(heading.nbytes) if target is None else self._read_into(target)):
                    break
                if target is not None:
                    self._arrived(heading, target)
                    del target
        except OSError:
            pass
        except Exception:
            log.exception("cannot read what a weight transport received")
        finally:
            self._ended()  # before the close, which the other side sees and answers
            self.close()

    def _read_into(self, target: torch.Tensor) -> bool:
        """Read into a tensor; return True if all bytes came."""
        import torch

        into = target if target.is_contiguous() else torch.empty_like(target, memory_format=torch.contiguous_format)
        if not self._fill(into.reshape(-1).view(torch.uint8).numpy().data):
            return False
        if into is not target:
            target.copy_(into)
        return True

    def _drop(self, nbytes: int) -> bool:
        room = memoryview(bytearray(min(nbytes, DROPPED_BYTES)))
        while nbytes:
            if not self._fill(room[:nbytes]):
                return False
            nbytes -= min(nbytes, len(room))
        return True

    def _fill(self, room: memoryview) -> bool:
        """Read until `room` is full; return False if the other side closed first."""
        while len(room):
            count = self._stream.recv_into(room)
            if not count:
                return False
            room = room[count:]
        return True

    def close(self) -> None:
        """End the connection and the thread."""
        with suppress(OSError):  # gone already
            self._stream.shutdown(socket.SHUT_RDWR)
        self._stream.close()
