"""The server of `enginehouse watch`, which shows the growing page of a run only to users of this machine.

It listens on the loopback address. A request needs the token in the address, and a host name of this machine; another
page in the same browser has neither. The server never makes a file path from a part of a request.
"""

from __future__ import annotations

import contextlib
import gzip
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, parse_qs, urlsplit

from enginehouse.errors import UserError
from enginehouse_report.page import page
from enginehouse_report.run_files import RunFiles
from enginehouse_report.samples import MOST_ROWS, SampleTable, sample_files, whole_row
from enginehouse_report.spans import read_timeline
from enginehouse_rl.config.earlier_run import read_record
from enginehouse_rl.runs.jsonlines import encode_row

HOST = "127.0.0.1"
NAMES = ("127.0.0.1", "localhost")
"""Host names that requests may have, with any port, because a tunnel may have another port. Another host name belongs
to a foreign page that redirects its own name to this machine."""
READ_SECONDS = 1.0
"""Time limit for reading samples for one reply. The next reply continues."""
COMPRESSED_BYTES = 4096
"""Minimum size of replies that are compressed, which helps over a tunnel."""

Reply = tuple[HTTPStatus, str, str]
"""A status, a content type, and a text."""


class LiveRun:
    """Reads a growing run directory for any number of pages. The directory need not exist yet."""

    def __init__(self, path: Path):
        self._files = RunFiles(path)
        self._process: Any = None
        self._lock = threading.Lock()
        self._generation = 0
        self._forget_samples()

    def _forget_samples(self) -> None:
        self._samples = SampleTable()
        self._stamps: dict[Path, tuple[int, int, int]] = {}

    def news(self, cursors: Mapping[str, int]) -> dict[str, Any]:
        """Return the data that a page does not have yet.

        Args:
            cursors: `next` of the previous reply; empty for the first request.

        Returns:
            `part` and `samples` as in a report, without the rows that the page has; `whole`: True if the page must
            discard its rows, because the reply contains all rows; and `next`.
        """
        with self._lock:
            self._refresh()
            whole = cursors.get("generation") != self._generation
            at = {} if whole else cursors
            has = {name: max(at.get(name, 0), 0) for name in ("metrics", "validations", "samples")}
            return {
                "whole": whole,
                "part": self._files.part(has["metrics"], has["validations"]),
                "samples": self._samples.part(has["samples"]),
                "next": {
                    "generation": self._generation,
                    "metrics": len(self._files.metrics.rows),
                    "validations": len(self._files.validations.rows),
                    "samples": len(self._samples.places),
                },
            }

    def sample(self, file: str, line: int) -> dict[str, Any] | None:
        """Return the whole row by its file of samples and its line number, or None if there is none."""
        with self._lock:
            lines = self._samples.columns.get("line", ())
            places = (place for at, place in zip(lines, self._samples.places) if at == line and place.file.name == file)
            place = next(places, None)
        return None if place is None else whole_row(place)

    def timeline(self) -> dict[str, Any]:
        """Return the timeline so far, as `read_timeline` does."""
        return read_timeline(self._files.path / "timeline.json")

    def _refresh(self) -> None:
        """Read new data. Read all data again if another process continues the run, or a file was truncated."""
        record = read_record(self._files.path)
        cut_back, process = False, (record.get("started"), record.get("pid"))
        if record and process != self._process:
            cut_back, self._process, self._files = self._process is not None, process, RunFiles(self._files.path)
        cut_back |= self._files.refresh()
        stamps = {file: stamp for file in sample_files(self._files.path) if (stamp := _stamp(file)) is not None}
        if cut_back or any(stamps.get(file) != stamp for file, stamp in self._stamps.items()):
            self._generation += 1
            self._forget_samples()
        until = time.monotonic() + READ_SECONDS
        waiting = [file for file in stamps if file not in self._stamps]
        while waiting and time.monotonic() < until and len(self._samples.places) < MOST_ROWS:
            file = waiting.pop()  # the newest first
            self._samples.add(file)
            self._stamps[file] = stamps[file]
        self._samples.unread = [file.name for file in waiting]


def _stamp(file: Path) -> tuple[int, int, int] | None:
    """Return values that change when the file is replaced."""
    try:
        stat = file.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


class RunServer(ThreadingHTTPServer):
    """Serves the page of a run at `url`, which includes the token. With port 0 it listens at a free port."""

    daemon_threads = True

    def __init__(self, run: Path, port: int = 0):
        self.live = LiveRun(run)
        self.token = secrets.token_urlsafe(24)
        super().__init__((HOST, port), _Handler)
        self.url = f"http://{HOST}:{self.server_address[1]}/{self.token}/"
        self.page = page(run.name or str(run), {}, live=f"/{self.token}/")

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of a browser that closed the connection."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: RunServer
    protocol_version = "HTTP/1.1"
    timeout = 60

    def do_GET(self) -> None:
        try:
            reply = self._reply_to(urlsplit(self.path))
        except (ValueError, OSError) as error:
            reply = HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain", f"{type(error).__name__}: {error}"
        self._send(*reply)

    def _reply_to(self, url: SplitResult) -> Reply:
        _, token, *names = [*url.path.split("/"), ""]
        if not self._is_for_us() or not secrets.compare_digest(token.encode(), self.server.token.encode()):
            return HTTPStatus.FORBIDDEN, "text/plain", "Use the address that `enginehouse watch` printed."
        query = {name: values[-1] for name, values in parse_qs(url.query).items()}
        return self._reply_with(names[0] if names else "", query)

    def _is_for_us(self) -> bool:
        return self.headers.get("Host", "").rpartition(":")[0] in NAMES or self.headers.get("Host") in NAMES

    def _reply_with(self, what: str, query: Mapping[str, str]) -> Reply:
        live = self.server.live
        if what == "":
            return HTTPStatus.OK, "text/html", self.server.page
        content: Mapping[str, Any] | None
        if what == "data":
            content = live.news({name: int(value) for name, value in query.items() if value.isdecimal()})
        elif what == "sample":
            content = live.sample(query.get("file", ""), int(query.get("line", "0")))
        elif what == "timeline":
            content = live.timeline()
        else:
            return HTTPStatus.NOT_FOUND, "text/plain", "There is nothing here."
        if content is None:
            return HTTPStatus.NOT_FOUND, "text/plain", "There is no such row any more."
        return HTTPStatus.OK, "application/json", encode_row(content)

    def _send(self, status: HTTPStatus, kind: str, text: str) -> None:
        body = text.encode("utf-8", "backslashreplace")
        self.send_response(status)
        if len(body) > COMPRESSED_BYTES and "gzip" in self.headers.get("Accept-Encoding", ""):
            body = gzip.compress(body, 1)
            self.send_header("Content-Encoding", "gzip")
        for name, value in {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Cross-Origin-Resource-Policy": "same-origin",
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, because the page sends a request every two seconds."""


def serve(run: Path, port: int, ready: Callable[[str], None]) -> None:
    """Serve a run until Ctrl-C; port 0 is any free port. Call `ready` with the address.

    Raises:
        UserError: the port cannot be used.
    """
    try:
        server = RunServer(run, port)
    except OSError as error:
        raise UserError(
            f"--port {port} cannot be used: {error.strerror or error}. Name another, or leave it out"
        ) from error
    with server:
        ready(server.url)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever(poll_interval=0.2)
