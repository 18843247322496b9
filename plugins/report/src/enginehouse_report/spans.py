"""Selects the part of a run's timeline that a page shows, in whole steps: first, last and slowest steps come first."""

from __future__ import annotations

import bisect
import heapq
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from enginehouse_report.columns import number
from enginehouse_rl.runs.timeline import read_events

MOST_SPANS = 20_000
"""Maximum number of spans of a page."""
FIRST, LAST, SLOWEST = 2, 4, 3
"""Number of the first, of the last and of the slowest steps that are ranked before all others."""


LANE = re.compile(r"(?<!^episodes) \(\d+\)$")
"""Matches the end of a name such as `rollout (2)`, whose spans overlap the spans of `rollout`. Both names share a track
on the page."""


class Window(NamedTuple):
    """A step on the timeline. It begins at the end of the previous step; times are in microseconds. Step 0 is the start
    of the run."""

    step: int
    begin: float
    end: float


def read_timeline(path: Path, most: int = MOST_SPANS) -> dict[str, Any]:
    """Return the spans of as many whole steps as fit.

    Args:
        path: `timeline.json`, which may be missing or truncated.
        most: maximum number of spans.

    Returns:
        `tracks` and `names`: texts. `steps`: a list of `[step, begin, end]` in milliseconds. `columns` of the spans:
        `track` and `name`, indices into `tracks` and `names`; `begin` and `length` in milliseconds; and `details`.
        `of_steps` and `of_spans`: numbers of steps and spans in the file.
    """
    events = read_events(path) if path.is_file() else []
    names = {event["tid"]: event["args"]["name"] for event in events if event.get("name") == "thread_name"}
    tracks = {track: LANE.sub("", name) for track, name in names.items()}
    events = [event for event in events if event.get("pid") == 1]  # operators of a profile are for a trace viewer
    spans = [event for event in events if event["ph"] == "X" and number(event.get("dur")) is not None]
    spans = [event for event in spans if event.get("tid") in tracks and number(event.get("ts")) is not None]
    windows = _windows(spans)
    inside: dict[int, list[dict[str, Any]]] = defaultdict(list)
    ends = [window.end for window in windows]
    for event in spans:
        place = bisect.bisect_left(ends, event["ts"])
        inside[min(place, len(windows) - 1)].append(event)
    selected: dict[int, list[dict[str, Any]]] = {}
    room = most
    for place in _rank_windows(windows):
        events = inside[place]
        if len(events) > room:
            if selected:
                continue
            events = heapq.nlargest(room, events, key=lambda event: event["dur"])
        selected[place] = events
        room -= len(events)
    return _columns(windows, selected, tracks) | {"of_steps": len(windows), "of_spans": len(spans)}


def _windows(spans: Sequence[dict[str, Any]]) -> list[Window]:
    """Return contiguous windows, one per step. Without steps, return one window with everything."""
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


def _rank_windows(windows: Sequence[Window]) -> list[int]:
    """Return the indices of windows: the most interesting first, then the others from newest to oldest."""
    places = range(len(windows))
    slowest = heapq.nlargest(SLOWEST, places, key=lambda place: windows[place].end - windows[place].begin)
    return list(dict.fromkeys([*places[:FIRST], *reversed(places[-LAST:]), *slowest, *reversed(places)]))


def _columns(
    windows: Sequence[Window], selected: dict[int, list[dict[str, Any]]], tracks: dict[int, str]
) -> dict[str, Any]:
    spans = [event for place in sorted(selected) for event in selected[place]]
    track_names = list(dict.fromkeys(tracks[tid] for tid in sorted({event["tid"] for event in spans})))
    names = list(dict.fromkeys(str(event["name"]) for event in spans))
    track_places = {name: place for place, name in enumerate(track_names)}
    name_places = {name: place for place, name in enumerate(names)}
    return {
        "tracks": track_names,
        "names": names,
        "steps": [
            [windows[place].step, *(round(at / 1e3, 3) for at in windows[place][1:])] for place in sorted(selected)
        ],
        "columns": {
            "track": [track_places[tracks[event["tid"]]] for event in spans],
            "name": [name_places[str(event["name"])] for event in spans],
            "begin": [round(event["ts"] / 1e3, 3) for event in spans],
            "length": [round(event["dur"] / 1e3, 3) for event in spans],
            "details": [event.get("args") for event in spans],
        },
    }
