"""Sends JSON messages in both directions over a TCP connection between a sender and a receiver of weights."""

from __future__ import annotations

import json
import logging
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

log = logging.getLogger(__name__)

LONGEST_MESSAGE = 1 << 16

SENDING_SECONDS = 15
"""Time after which a blocked send closes the connection. The socket's buffer holds all messages of an update, so a send
blocks only if the other side has stopped reading."""


class ControlChannel:
    """One side of a connection.

    Args:
        connection: a connected socket, which is closed with the channel.

    Attributes:
        own_host: address of this side, by which the other side reaches it.
    """

    def __init__(self, connection: socket.socket):
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # no message is sent between updates
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SENDING_SECONDS, 0))
        self._connection = connection
        self._reading = connection.makefile("rb")
        self._sending = threading.Lock()
        self.own_host: str = connection.getsockname()[0]

    def send(self, message: dict[str, Any], after: bytes = b"") -> None:
        """Send the bytes `after`, and then a message. A failure closes the connection, which `listen` notices."""
        try:
            with self._sending:
                self._connection.sendall(after + json.dumps(message).encode() + b"\n")
        except OSError:
            self.close()

    def receive(self, seconds: float | None) -> dict[str, Any] | None:
        """Return the next message; None if the other side is closed or sends no valid message in time."""
        try:
            with self._ended_after(seconds):
                text = self._reading.readline(LONGEST_MESSAGE)
            message = json.loads(text) if text.endswith(b"\n") else None
            return message if isinstance(message, dict) else None
        except (OSError, ValueError, RecursionError):
            return None

    def receive_bytes(self, count: int, seconds: float) -> bytes:
        """Return the next `count` bytes; fewer if the other side is closed, or does not send them in time."""
        try:
            with self._ended_after(seconds):
                return self._reading.read(count)
        except (OSError, ValueError):
            return b""

    @contextmanager
    def _ended_after(self, seconds: float | None) -> Iterator[None]:
        """Close the connection if the whole block takes longer than `seconds`."""
        limit = None if seconds is None else threading.Timer(seconds, self.close)
        if limit is not None:
            limit.daemon = True
            limit.start()
        try:
            yield
        finally:
            if limit is not None:
                limit.cancel()

    def listen(self, on_message: Callable[[dict[str, Any]], None], on_end: Callable[[], None]) -> None:
        """Call `on_message` with each message, on a separate thread, and finally `on_end` once."""

        def read() -> None:
            try:
                while (message := self.receive(None)) is not None:
                    on_message(message)
            except Exception:
                log.exception("a message of a weight transport could not be handled, and its connection is closed")
            finally:
                self.close()
                on_end()

        threading.Thread(target=read, name="weights-control", daemon=True).start()

    def release(self) -> socket.socket:
        """Return the socket, without a time limit for sending. The channel must not be used any more. Bytes after the
        last message may be lost, so the other side must send nothing until this side has sent something."""
        self._reading.close()
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 0))
        return self._connection

    def close(self) -> None:
        """Close the connection for both sides. Callable twice, and from any thread."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
        self._reading.close()  # the descriptor is closed with the last of the two
