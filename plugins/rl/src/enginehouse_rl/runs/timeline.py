"""A run's timeline shows what each process did when: a Chrome trace for https://ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from enginehouse.jsontext import decode_json

FLUSH_SECONDS = 1.0
"""Minimum number of seconds between two writes."""
MOST_SPANS = 500_000
"""Maximum number of spans that viewers can open. Later spans are left out, and the trace says how many."""

OWN = "enginehouse"
"""The name of the group of rows that belong to the run itself, and not to another process."""
_END = b"\n]\n"


class Timeline:
    """Writes spans on named tracks to a file that is a valid JSON array after every write.

    A process that is killed during a write leaves the array open, at worst within its last line. The Chrome trace
    format allows this, and viewers open such a file as well.

    Several threads may use a timeline. Times are seconds of `time.monotonic()`; the trace counts from the start of the
    timeline.

    Args:
        path: The file; an existing file is replaced.
        before: The number of seconds to keep of an earlier trace in the file. The new trace continues after them. 0
            begins a new trace.
    """

    def __init__(self, path: Path, before: float = 0.0):
        self.path = path
        self.dropped = 0
        self._origin = time.monotonic() - before
        self._lock = threading.Lock()
        self._waiting: list[dict[str, Any]] = []
        self._written = 0
        self._last_flush = 0.0
        self._processes: dict[str, int] = {OWN: 1}
        self._tracks: dict[tuple[int, str], int] = {}
        self._lane_ends: dict[str, list[float]] = {}
        first = {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": OWN}}
        events = read_events(path, before) if before else []
        for event in events:
            if event["name"] == "thread_name":
                self._tracks[event["pid"], event["args"]["name"]] = event["tid"]
            elif event["name"] == "process_name":
                self._processes[event["args"]["name"]] = event["pid"]
        self._written = sum(event["ph"] == "X" for event in events)
        self._file = path.open("wb")
        self._file.write(b"[\n" + b",\n".join(json.dumps(event).encode() for event in events or [first]) + _END)
        self._file.flush()

    def span(
        self, name: str, started: float, ended: float, track: str = "controller", *, process: str = "", **details: Any
    ) -> None:
        """Add a span. Spans of one track must nest; use `lane` for spans that may overlap.

        Args:
            track: The row of the span.
            process: The group of the row; empty: the group of the run itself.
            details: Plain data that a viewer shows when the span is clicked.
        """
        with self._lock:
            self._add(name, started, ended, track, details, process or OWN)

    def call(self, group: str, method: str, call: int, start_ns: int, end_ns: int) -> None:
        """Add a worker group's call. Overlapping calls get separate rows.

        It is a listener for `enginehouse.controller.tracing.add_listener`; times are nanoseconds of
        `time.monotonic_ns()`.
        """
        self.lane(group, method, start_ns / 1e9, end_ns / 1e9, call=call)

    def lane(
        self,
        track: str,
        name: str,
        started: float,
        ended: float,
        parts: Iterable[tuple[str, float, float, dict[str, Any]]] = (),
        **details: Any,
    ) -> None:
        """Add a span that may overlap other spans of its track. An overlapping span gets a separate row.

        `parts` are spans within this span, each with a name, times and details. The other arguments are as in `span`.
        """
        with self._lock:
            lanes = self._lane_ends.setdefault(track, [])
            lane = next((index for index, end in enumerate(lanes) if end <= started), len(lanes))
            if lane == len(lanes):
                lanes.append(ended)
            lanes[lane] = ended
            row = track if lane == 0 else f"{track} ({lane + 1})"
            for span in ((name, started, ended, details), *parts):
                self._add(*span[:3], row, span[3])

    def flush(self) -> None:
        with self._lock:
            self._flush()

    def close(self) -> None:
        """Write the waiting spans and close the file. Later spans are dropped."""
        with self._lock:
            if self._file.closed:
                return
            if self.dropped:
                self._add_event(
                    {"name": f"{self.dropped} later spans left out", "ph": "i", "s": "g", "ts": self._read_clock()}
                )
            self._flush()
            self._file.close()

    def _read_clock(self) -> float:
        return round((time.monotonic() - self._origin) * 1e6, 1)

    def _add(
        self, name: str, started: float, ended: float, track: str, details: dict[str, Any], process: str = OWN
    ) -> None:
        if self._file.closed or self._written + len(self._waiting) >= MOST_SPANS:
            self.dropped += 1
            return
        if process not in self._processes:
            self._processes[process] = pid = len(self._processes) + 1
            self._add_event({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": process}})
        pid = self._processes[process]
        if (pid, track) not in self._tracks:
            self._tracks[pid, track] = number = len(self._tracks) + 1
            row = {"pid": pid, "ph": "M", "tid": number}
            self._add_event({"name": "thread_name", **row, "args": {"name": track}})
            self._add_event({"name": "thread_sort_index", **row, "args": {"sort_index": number}})
        begin, end = (round((moment - self._origin) * 1e6, 1) for moment in (started, ended))
        event: dict[str, Any] = {
            "pid": pid,
            "name": name,
            "ph": "X",
            "tid": self._tracks[pid, track],
            "ts": begin,
            "dur": round(end - begin, 1),  # of rounded times, so that nested spans stay nested
        }
        if details:
            event["args"] = details
        self._add_event(event)
        if ended - self._last_flush >= FLUSH_SECONDS:
            self._last_flush = ended
            self._flush()

    def _add_event(self, event: dict[str, Any]) -> None:
        self._waiting.append({"pid": 1, **event})

    def _flush(self) -> None:
        if not self._waiting or self._file.closed:
            return
        text = b"".join(b",\n" + json.dumps(event, default=str).encode() for event in self._waiting)
        # One write over the closing bracket, bracket included. (The kernel can stop it between two pages for SIGKILL.)
        self._file.seek(-len(_END), 2)
        self._file.write(text + _END)
        self._file.flush()
        self._written += len(self._waiting)
        self._waiting.clear()


def read_events(path: Path, seconds: float = math.inf) -> list[dict[str, Any]]:
    """Return the events that began within the first `seconds` of a trace. Damaged lines are left out."""
    events = []
    for line in path.read_bytes().split(b"\n") if path.exists() else ():
        try:
            event = decode_json(line.removesuffix(b","))
        except ValueError:
            continue
        if _is_event(event) and event.get("ts", 0.0) <= seconds * 1e6:
            events.append(event)
    return events


def _is_event(event: Any) -> bool:
    """True if a value has all the fields of an event that this module reads."""
    if not isinstance(event, dict) or not isinstance(event.get("ts", 0.0), (int, float)):
        return False
    if event.get("name") not in ("thread_name", "process_name"):
        return "name" in event and "ph" in event
    arguments = event.get("args")
    is_named = isinstance(arguments, dict) and isinstance(arguments.get("name"), str)
    is_numbered = isinstance(event.get("pid"), int) and (
        event["name"] == "process_name" or isinstance(event.get("tid"), int)
    )
    return is_named and is_numbered and "ph" in event
