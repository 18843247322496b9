"""A run's timeline, as much of it as a page draws: whole steps, the first, the last and the slowest before others."""

from __future__ import annotations

import bisect
import heapq
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from enginehouse_report.columns import number
from enginehouse_rl.runs.timeline import read_events

MOST_SPANS = 20_000
"""Spans of a page."""
FIRST, LAST, SLOWEST = 2, 4, 3
"""So many of the first, the last and the slowest steps come before all others."""


class Window(NamedTuple):
    """A step on the timeline, with what came between it and the one before; microseconds. Step 0 is the start."""

    step: int
    begin: float
    end: float


def timeline_of(path: Path, most: int = MOST_SPANS) -> dict[str, Any]:
    """The spans of whole steps, as many as fit.

    Args:
        path: `timeline.json`; it may be missing or cut off.
        most: spans.

    Returns:
        `tracks` and `names`, texts; `steps`, each `[step, begin, end]` in milliseconds; `columns` of the spans: `track`
        and `name`, places in those, `begin` and `length`, milliseconds, and `details`; and `of_steps` and `of_spans`:
        how many there are in the file.
    """
    events = read_events(path) if path.is_file() else []
    tracks = {event["tid"]: event["args"]["name"] for event in events if event.get("name") == "thread_name"}
    events = [event for event in events if event.get("pid") == 1]  # operators of a profile are for a trace viewer
    spans = [event for event in events if event["ph"] == "X" and number(event.get("dur")) is not None]
    spans = [event for event in spans if event.get("tid") in tracks and number(event.get("ts")) is not None]
    windows = _windows(spans)
    inside: dict[int, list[dict[str, Any]]] = defaultdict(list)
    ends = [window.end for window in windows]
    for event in spans:
        place = bisect.bisect_left(ends, event["ts"])
        inside[min(place, len(windows) - 1)].append(event)
    kept: dict[int, list[dict[str, Any]]] = {}
    room = most
    for place in _in_order(windows):
        found = inside[place]
        if len(found) > room:
            if kept:
                continue
            found = heapq.nlargest(room, found, key=lambda event: event["dur"])
        kept[place] = found
        room -= len(found)
    return _columns(windows, kept, tracks) | {"of_steps": len(windows), "of_spans": len(spans)}


def _windows(spans: Sequence[dict[str, Any]]) -> list[Window]:
    """One a step, end to end; without steps, one of all there is."""
    windows: list[Window] = []
    before = 0.0
    for event in spans:
        word, _, step = str(event["name"]).partition(" ")
        if word == "step" and step.isdigit():
            if not windows and event["ts"] > 0:
                windows.append(Window(0, 0.0, event["ts"]))
                before = event["ts"]
            windows.append(Window(int(step), before, before := event["ts"] + event["dur"]))
    last = max((event["ts"] + event["dur"] for event in spans), default=0.0)
    return windows or ([Window(0, 0.0, last)] if spans else [])


def _in_order(windows: Sequence[Window]) -> list[int]:
    """Places of windows, those that matter most first; the rest from the newest back."""
    places = range(len(windows))
    slowest = heapq.nlargest(SLOWEST, places, key=lambda place: windows[place].end - windows[place].begin)
    return list(dict.fromkeys([*places[:FIRST], *reversed(places[-LAST:]), *slowest, *reversed(places)]))


def _columns(
    windows: Sequence[Window], kept: dict[int, list[dict[str, Any]]], tracks: dict[int, str]
) -> dict[str, Any]:
    spans = [event for place in sorted(kept) for event in kept[place]]
    track_names = list(dict.fromkeys(tracks[tid] for tid in sorted({event["tid"] for event in spans})))
    names = list(dict.fromkeys(str(event["name"]) for event in spans))
    track_places = {name: place for place, name in enumerate(track_names)}
    name_places = {name: place for place, name in enumerate(names)}
    return {
        "tracks": track_names,
        "names": names,
        "steps": [[windows[place].step, *(round(at / 1e3, 3) for at in windows[place][1:])] for place in sorted(kept)],
        "columns": {
            "track": [track_places[tracks[event["tid"]]] for event in spans],
            "name": [name_places[str(event["name"])] for event in spans],
            "begin": [round(event["ts"] / 1e3, 3) for event in spans],
            "length": [round(event["dur"] / 1e3, 3) for event in spans],
            "details": [event.get("args") for event in spans],
        },
    }
