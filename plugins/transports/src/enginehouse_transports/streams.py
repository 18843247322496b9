"""Parts of parameters as bytes over a TCP connection of their own, each behind a heading; a thread at each end."""

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

HEADING = struct.Struct("<qqqq")

HEADING_BYTES = HEADING.size

DROPPED_BYTES = 1 << 20
"""Room for what is read and dropped."""


class Heading(NamedTuple):
    """What comes next.

    Attributes:
        version: of the update.
        bucket: which of its buckets.
        move: number of the move in the plan.
        nbytes: bytes behind the heading.
    """

    version: int
    bucket: int
    move: int
    nbytes: int


class PartSender:
    """The sending end. What was put is written whole or not at all, also after the update it belongs to has failed.

    Args:
        stream: the connection.
        barrier: what belongs to an update aborted there is not written.
        ended: called where the other end is gone.
    """

    def __init__(self, stream: socket.socket, barrier: Barrier, ended: Callable[[], None]):
        self._stream = stream
        self._barrier = barrier
        self._ended = ended
        self._waiting: queue.SimpleQueue[tuple[Heading, torch.Tensor] | None] = queue.SimpleQueue()
        threading.Thread(target=self._write, name="weights-part-sender", daemon=True).start()

    def put(self, heading: Heading, part: torch.Tensor) -> None:
        """Have a part written, in turn. It is contiguous, in host memory, and unchanged as long as its update lasts."""
        self._waiting.put((heading, part))

    def _write(self) -> None:
        import torch

        try:
            while (found := self._waiting.get()) is not None:
                heading, part = found
                with self._barrier.changed:
                    if self._barrier.aborted >= heading.version:
                        continue
                self._stream.sendall(HEADING.pack(*heading))
                self._stream.sendall(part.reshape(-1).view(torch.uint8).numpy().data)
                del found, part
        except OSError:
            self._ended()

    def close(self) -> None:
        """End the thread; the connection is closed by who made it."""
        self._waiting.put(None)


class PartReceiver:
    """The receiving end: reads at any time what comes.

    Args:
        stream: the connection.
        room: says where the bytes behind a heading are to go, contiguous or not; None: they are dropped.
        arrived: called when they are there.
        ended: called once, when nothing comes any more.
    """

    def __init__(
        self,
        stream: socket.socket,
        room: Callable[[Heading], torch.Tensor | None],
        arrived: Callable[[Heading], None],
        ended: Callable[[], None],
    ):
        self._stream = stream
        self._room, self._arrived, self._ended = room, arrived, ended
        threading.Thread(target=self._read, name="weights-part-receiver", daemon=True).start()

    def _read(self) -> None:
        heading_bytes = bytearray(HEADING_BYTES)
        try:
            while self._filled(memoryview(heading_bytes)):
                heading = Heading(*HEADING.unpack(heading_bytes))
                target = self._room(heading)
                if not (self._dropped(heading.nbytes) if target is None else self._taken(target)):
                    break
                if target is not None:
                    del target
                    self._arrived(heading)
        except OSError:
            pass
        except Exception:
            log.exception("what came over a weight transport was not understood")
        finally:
            self._ended()  # first: the other end, which sees the connection close, answers
            self.close()

    def _taken(self, target: torch.Tensor) -> bool:
        """Read into a tensor; whether all came."""
        import torch

        into = target if target.is_contiguous() else torch.empty_like(target, memory_format=torch.contiguous_format)
        if not self._filled(into.reshape(-1).view(torch.uint8).numpy().data):
            return False
        if into is not target:
            target.copy_(into)
        return True

    def _dropped(self, nbytes: int) -> bool:
        room = memoryview(bytearray(min(nbytes, DROPPED_BYTES)))
        while nbytes:
            if not self._filled(room[:nbytes]):
                return False
            nbytes -= min(nbytes, len(room))
        return True

    def _filled(self, room: memoryview) -> bool:
        """Read until `room` is full; False where the other end closed before."""
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
