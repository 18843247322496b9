"""Profiles a process with torch.profiler, writes a Chrome trace, and returns the longest spans.

Torch has one profiler per process, so roles that share a process share its trace.
"""

from __future__ import annotations

import gzip
import heapq
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from enginehouse.errors import first_line

if TYPE_CHECKING:
    from enginehouse.engines.model import ProcessContext

DRAWN = ("cpu_op", "user_annotation", "kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation", "cuda_runtime")
"""Categories of torch's events that a timeline shows. The trace has all categories."""

CHUNK = 1 << 18
"""Number of characters of a trace to read at a time."""
EVENTS = re.compile(r'(?:"baseTimeNanoseconds":\s*(?P<base>\d+).*)?"traceEvents":\s*\[', re.DOTALL)
BETWEEN = re.compile(r"[\s,]*")


@dataclass(frozen=True)
class Profile:
    """Profile of a process.

    Attributes:
        name: roles and rank of the process.
        problem: the reason why there is no trace; empty if there is one.
        spans: the longest spans: row, name, start and length, in nanoseconds of the node's clock.
    """

    name: str
    problem: str = ""
    path: str = ""
    spans: Sequence[tuple[str, str, int, int]] = field(default=(), repr=False)
    left_out: int = 0


_under_way: list[Any] = []
"""This process's running profiler, or the reason why it does not run."""


def begin_profile(context: ProcessContext) -> None:
    """Profile all threads of this process, unless another role has started the profiler."""
    if _under_way:
        return
    import torch
    import torch.profiler as torch_profiler

    activities = [torch_profiler.ProfilerActivity.CPU]
    if context.device.startswith("cuda"):
        activities.append(torch_profiler.ProfilerActivity.CUDA)
    try:
        if torch.autograd._profiler_enabled():  # torch would silently stop the other profiler
            raise RuntimeError("another profiler already runs in its process")
        # Rollout engines and autograd have their own threads. `_ExperimentalConfig` is torch's name.
        threads = torch_profiler._ExperimentalConfig(profile_all_threads=True)
        profiler = torch_profiler.profile(activities=activities, experimental_config=threads)
        profiler.start()
    except Exception as error:  # torch's options may have changed, which must not end the run
        _under_way.append(first_line(error))
    else:
        _under_way.append(profiler)


def end_profile(context: ProcessContext, rank: int, directory: str, most: int) -> Profile | None:
    """End a profile, write its trace into a directory, and return its `most` longest spans.

    Returns:
        None if another role of this process has ended the profile.
    """
    if not _under_way:
        return None
    profiler = _under_way.pop()
    # A replica in a separate process has its number in its role's name.
    roles = dict.fromkeys([context.role, *context.labels.get("roles", ())])
    role, *guests = (name.removesuffix(f"-{rank}") for name in roles)
    name = f"{', '.join([role, *guests])} rank {rank}"
    if isinstance(profiler, str):
        return Profile(name, profiler)
    path = Path(directory) / f"{role}-{rank}.json.gz"
    try:
        profiler.stop()
        path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(path))
        with gzip.open(path, "rt", encoding="utf-8") as file:
            spans, left_out = _longest_spans(file, most)
    except Exception as error:  # for example a full disk
        return Profile(name, first_line(error))
    return Profile(name, "", str(path), spans, left_out)


def stop_profile() -> None:
    """Stop a profiler that a failed step left running, and drop its trace."""
    while _under_way:
        if not isinstance(profiler := _under_way.pop(), str):
            with suppress(Exception):  # the engine must be released in any case
                profiler.stop()


def _longest_spans(trace: TextIO, most: int) -> tuple[list[tuple[str, str, int, int]], int]:
    """Return the longest spans of a trace, and the number of the remaining spans.

    Torch writes times in microseconds after `baseTimeNanoseconds`. The trace is read in pieces, because the trace of a
    step on a GPU may have gigabytes.
    """
    text = ""
    while (header := EVENTS.search(text)) is None:
        if not (more := trace.read(CHUNK)):
            raise ValueError("torch's trace has no traceEvents")
        text += more
    base = int(header["base"] or 0)
    count = 0

    def spans() -> Iterator[tuple[float, str, str, int]]:
        nonlocal count
        for event in _read_objects(trace, text[header.end() :]):
            if event.get("ph") == "X" and event.get("cat") in DRAWN:
                count += 1
                yield event["dur"], _choose_row(event), event["name"], base + int(event["ts"] * 1000)

    longest = heapq.nlargest(most, spans(), key=lambda span: span[0])
    return [(row, name, begin, int(length * 1000)) for length, row, name, begin in longest], max(count - most, 0)


def _read_objects(file: TextIO, text: str) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON array. `text` begins after its opening bracket, and `file` has the rest."""
    decode, place = json.JSONDecoder().raw_decode, 0
    while True:
        place = BETWEEN.match(text, place).end()  # type: ignore[union-attr]
        if text.startswith("]", place):
            return
        try:
            event, place = decode(text, place)
        except ValueError:
            if not (more := file.read(CHUNK)):
                raise
            text, place = text[place:] + more, 0
        else:
            yield event


def _choose_row(event: Mapping[str, Any]) -> str:
    if event["cat"] in ("cpu_op", "user_annotation", "cuda_runtime"):
        return f"thread {event['tid']}"
    return f"gpu {event['pid']} stream {event['tid']}"
