"""Sends requests to an HTTP server from an event loop, with only the standard library.

A worker that only talks to a server then needs no extra package. Each request has its own connection, because requests
are few and large, and because the server notices a cancelled request when its connection closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from enginehouse.errors import ConfigError, EnginehouseError

try:
    from orjson import dumps, loads
except ImportError:  # the standard library is several times slower

    def dumps(value: Any) -> bytes:
        """Return `value` as JSON bytes."""
        return json.dumps(value, separators=(",", ":")).encode()

    loads = json.loads


class NoAnswer(EnginehouseError):
    """There is no server, or the connection broke before its answer was complete."""


class HTTPStatusError(EnginehouseError):
    """An answer whose HTTP `status` is not a success."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status

    def __reduce__(self):
        return type(self), (str(self), self.status)


class Address:
    """A server's base URL, `http://HOST:PORT` or `https://...`, with or without a path.

    Raises:
        ConfigError: `url` is not such a URL.
    """

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        parts = urlsplit(self.url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1 or parts.query or parts.fragment:
            raise ConfigError(f"{url!r} is not the URL of a server, such as http://127.0.0.1:30000")
        self._host, self._port = parts.hostname, port or (443 if parts.scheme == "https" else 80)
        self._path, self._name = parts.path, parts.netloc.rpartition("@")[2]
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None

    async def call(self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Any:
        """Send a request with `body` as JSON, if there is one; return the answer as decoded JSON, or else as text.

        Raises:
            NoAnswer: No complete answer came back.
            HTTPStatusError: The answer is not a success.
        """
        content = b"" if body is None else dumps(body)
        lines = [
            f"{method} {self._path}{path} HTTP/1.0",  # answers to HTTP/1.0 come in one piece
            f"Host: {self._name}",
            "Content-Type: application/json",
            f"Content-Length: {len(content)}",
            *(f"{name}: {value}" for name, value in (headers or {}).items()),
        ]
        try:
            reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._ssl)
            try:
                writer.write("\r\n".join([*lines, "", ""]).encode() + content)
                await writer.drain()
                answer = await reader.read(-1)
            finally:
                writer.close()
        except OSError as error:
            raise NoAnswer(f"{self.url}{path}: {error}") from error
        return self._read(path, answer)

    def _read(self, path: str, answer: bytes) -> Any:
        head, separator, content = answer.partition(b"\r\n\r\n")
        status_line, *lines = head.decode("latin-1").split("\r\n")
        words = status_line.split()
        if not separator or len(words) < 2 or not words[0].startswith("HTTP/") or not words[1].isdigit():
            reason = "what answers is no HTTP server" if answer else "the connection was closed without an answer"
            raise NoAnswer(f"{self.url}{path}: {reason}")
        fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if len(content) < int(fields.get("content-length", 0)):
            raise NoAnswer(f"{self.url}{path}: the connection was closed before the answer was complete")
        status = int(words[1])
        value: Any = content.decode(errors="replace")
        with contextlib.suppress(ValueError):
            value = loads(content)
        if not 200 <= status < 300:
            raise HTTPStatusError(f"{self.url}{path}: {_find_message(value) or status_line}", status)
        return value


def _find_message(value: Any) -> str:
    """Return the sentence of an answer that explains the error."""
    while isinstance(value, dict):
        value = next((value[name] for name in ("error", "message", "detail") if value.get(name)), "")
    return str(value).strip()[:1000]
