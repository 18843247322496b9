"""Profiles of a process by torch.profiler: a Chrome trace, and its longest spans.

Torch has one profiler a process, so roles that share a process share its trace. In a step that is not profiled nothing
here is called, and nothing imported.
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
"""Categories of torch's events that are drawn on a timeline; the file of the process has all."""

CHUNK = 1 << 18
"""Characters of a trace that are read at a time."""
EVENTS = re.compile(r'(?:"baseTimeNanoseconds":\s*(?P<base>\d+).*)?"traceEvents":\s*\[', re.DOTALL)
BETWEEN = re.compile(r"[\s,]*")


@dataclass(frozen=True)
class Profile:
    """What a process did while it was profiled.

    Attributes:
        name: of the process: its roles and its rank.
        problem: why there is no trace; empty where there is one.
        path: of the trace.
        spans: the longest, each its row, its name, and its begin and length in nanoseconds of the node's clock.
        left_out: how many others there are.
    """

    name: str
    problem: str = ""
    path: str = ""
    spans: Sequence[tuple[str, str, int, int]] = field(default=(), repr=False)
    left_out: int = 0


_under_way: list[Any] = []
"""This process's profiler while it runs, and what it could not do."""


def begin_profile(context: ProcessContext) -> None:
    """Have all threads of this process profiled, if they are not."""
    if _under_way:
        return
    import torch
    import torch.profiler as torch_profiler

    activities = [torch_profiler.ProfilerActivity.CPU]
    if context.device.startswith("cuda"):
        activities.append(torch_profiler.ProfilerActivity.CUDA)
    try:
        if torch.autograd._profiler_enabled():  # torch would silently take it from them
            raise RuntimeError("somebody else's profiler runs in its process")
        # A rollout engine has a thread of its own, and autograd too. `_ExperimentalConfig` is torch's name for it.
        threads = torch_profiler._ExperimentalConfig(profile_all_threads=True)
        profiler = torch_profiler.profile(activities=activities, experimental_config=threads)
        profiler.start()
    except Exception as error:  # or torch's options have changed: the run need not end
        _under_way.append(first_line(error))
    else:
        _under_way.append(profiler)


def end_profile(context: ProcessContext, rank: int, directory: str, most: int) -> Profile | None:
    """End what `begin_profile` began, and write the trace into a directory; None if another role of this process has.

    Args:
        context: of the process.
        rank: of the role's processes.
        directory: where; made if it is not there.
        most: spans that are returned.
    """
    if not _under_way:
        return None
    profiler = _under_way.pop()
    # A replica in a process of its own has its number in its role's name.
    roles = dict.fromkeys([context.role, *context.labels.get("roles", ())])
    role, *beside = (one.removesuffix(f"-{rank}") for one in roles)
    name = f"{', '.join([role, *beside])} rank {rank}"
    if isinstance(profiler, str):
        return Profile(name, profiler)
    path = Path(directory) / f"{role}-{rank}.json.gz"
    try:
        profiler.stop()
        path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(path))
        with gzip.open(path, "rt", encoding="utf-8") as file:
            spans, left_out = _longest(file, most)
    except Exception as error:  # no room on the disk, say
        return Profile(name, first_line(error))
    return Profile(name, "", str(path), spans, left_out)


def stop_profile() -> None:
    """Stop a profiler that a step which failed has left, and keep nothing of it."""
    while _under_way:
        if not isinstance(profiler := _under_way.pop(), str):
            with suppress(Exception):  # the engine is to be released, whatever torch says
                profiler.stop()


def _longest(trace: TextIO, most: int) -> tuple[list[tuple[str, str, int, int]], int]:
    """The longest spans of a trace as torch writes it, times in microseconds from `baseTimeNanoseconds` on, and how
    many others there are. No more of it is held at once: that of a step on a GPU may have gigabytes."""
    text = ""
    while (found := EVENTS.search(text)) is None:
        if not (more := trace.read(CHUNK)):
            raise ValueError("torch's trace has no traceEvents")
        text += more
    base = int(found["base"] or 0)
    count = 0

    def drawn() -> Iterator[tuple[float, str, str, int]]:
        nonlocal count
        for event in _objects(trace, text[found.end() :]):
            if event.get("ph") == "X" and event.get("cat") in DRAWN:
                count += 1
                yield event["dur"], _row_of(event), event["name"], base + int(event["ts"] * 1000)

    longest = heapq.nlargest(most, drawn(), key=lambda span: span[0])
    return [(row, name, begin, int(length * 1000)) for length, row, name, begin in longest], max(count - most, 0)


def _objects(file: TextIO, text: str) -> Iterator[dict[str, Any]]:
    """The objects of a JSON array, one at a time: `text` is its beginning, behind the bracket, and `file` goes on."""
    decode, place = json.JSONDecoder().raw_decode, 0
    while True:
        place = BETWEEN.match(text, place).end()  # type: ignore[union-attr]
        if text.startswith("]", place):
            return
        try:
            found, place = decode(text, place)
        except ValueError:
            if not (more := file.read(CHUNK)):
                raise
            text, place = text[place:] + more, 0
        else:
            yield found


def _row_of(event: Mapping[str, Any]) -> str:
    if event["cat"] in ("cpu_op", "user_annotation", "cuda_runtime"):
        return f"thread {event['tid']}"
    return f"gpu {event['pid']} stream {event['tid']}"
