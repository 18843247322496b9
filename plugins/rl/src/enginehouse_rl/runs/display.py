"""The display of a run on a terminal: lines that fit its width and height, the most important first."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console, ConsoleOptions, RenderResult
from rich.spinner import Spinner
from rich.text import Text

from enginehouse_rl.runs.sparkline import ASCII, BLOCKS, draw_sparkline
from enginehouse_rl.runs.validations import format_digits

if TYPE_CHECKING:
    from enginehouse.fleet.replica import ReplicaStatus
    from enginehouse_rl.runs.progress import Progress

LABEL, VALUE, MEAN, SPARK = 10, 8, 13, 48
"""Column widths of a metric's name, value and mean, and the maximum width of its sparkline."""
NARROW = 20
"""Width in columns below which long lines are cut off instead of wrapped."""
MOST_REPLICAS = 4
"""Maximum number of replicas that are shown one by one. If there are more, the number in each state is shown."""
ALARMS_SHOWN = 3
SHORTEST = 0.01
"""Smallest fraction of a step's time for which a phase is shown."""


class Line(NamedTuple):
    """A line of the display and its rank. If not all lines fit, the lines with the largest rank are left out first."""

    text: Text
    rank: int


class Display:
    """Draws a run's current progress. A renderable of rich."""

    def __init__(self, progress: Progress):
        self._progress = progress
        self._spinner = Spinner("dots")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, height = options.max_width, max(console.size.height - 1, 1)
        lines = list(self._iterate_lines(console, width, options.ascii_only))
        shown = sorted(range(len(lines)), key=lambda place: lines[place].rank)[:height]
        for place in sorted(shown):
            text = lines[place].text
            text.truncate(width, overflow="ellipsis" if not options.ascii_only else "crop")
            text.no_wrap = True
            yield text

    def _iterate_lines(self, console: Console, width: int, ascii_only: bool) -> Iterator[Line]:
        progress = self._progress
        if progress.task_seconds is not None:
            part = f", {progress.part}" if progress.part else ""
            task = f"{progress.task_name} ({progress.task_seconds:.0f} s){part}"
            turn = "" if ascii_only else f"{self._spinner.render(time.perf_counter())} "
            yield Line(Text(f"{turn}{task}"), 0)
            return
        if not progress.history.steps:
            return
        yield Line(self._make_header(width, ascii_only), 0)
        if status := progress.part or progress.activity:
            yield Line(Text(status, style="dim"), 4)
        yield from self._list_figures(width, ascii_only)
        for line in (*self._list_places(), *self._list_alarms()):
            first, *others = line.text.wrap(console, width) if width >= NARROW else [line.text]
            yield line._replace(text=first)
            yield from (Line(text, line.rank + 1) for text in others)

    def _make_header(self, width: int, ascii_only: bool) -> Text:
        history = self._progress.history
        position = f"step {history.step:,}/{history.steps:,}"
        times = f"elapsed {format_duration(history.seconds)}, {format_duration(history.seconds_left)} left"
        title = Text(self._progress.title, style="bold")
        title.truncate(max(width // 3, 8), overflow="ellipsis" if not ascii_only else "crop")
        cells = min(32, width - title.cell_len - len(position) - len(times) - 5)
        filled = round(max(cells, 0) * min(history.step / history.steps, 1.0))
        full, empty = ("#", ".") if ascii_only else ("━", "─")
        header = title.append(" ")
        if cells >= 4:
            header.append(full * filled, "not bold magenta").append(empty * (cells - filled) + " ", "not bold dim")
        return header.append(f"{position}  ", "not bold").append(times, "not bold dim")

    def _list_figures(self, width: int, ascii_only: bool) -> Iterator[Line]:
        figures, ramp = self._progress.list_figures(), ASCII if ascii_only else BLOCKS
        columns = 2 if width >= 2 * (LABEL + VALUE + MEAN + 2 + SPARK // 2) + 3 and len(figures) > 4 else 1
        spark = min((width - 3 * (columns - 1)) // columns - LABEL - VALUE - MEAN - 2, SPARK)
        cells = [
            Text.assemble(
                (label.ljust(LABEL), "dim"), (value.rjust(VALUE), "bold"), (mean.rjust(MEAN), "dim"), "  ",
                (draw_sparkline(points, spark, ramp).ljust(max(spark, 0)), "cyan"),
            )
            for label, value, mean, points in figures
        ]  # fmt: skip
        rows = -(-len(cells) // columns)
        for row in range(rows):
            parts = [cells[row + column * rows] for column in range(columns) if row + column * rows < len(cells)]
            yield Line(Text("   ").join(parts), 1 + (row > 1))
        if failures := self._progress.describe_reward_failures():
            yield Line(Text(f"reward failures {failures}", style="yellow"), 2)

    def _list_places(self) -> Iterator[Line]:
        progress, history = self._progress, self._progress.history
        least = SHORTEST * (history.now("time/step") or 0.0)
        if phases := "  ".join(
            f"{name} {format_digits(seconds)}" for name, seconds in history.phases() if seconds >= least
        ):
            yield Line(Text(f"seconds a step: {phases}", style="dim"), 5)
        if history.validations:
            yield from (Line(Text(line, style="dim"), 6) for line in history.validations.lines())
        if replicas := progress.replicas() if progress.replicas is not None else ():
            style = "dim" if all(replica.state == "up" for replica in replicas) else "yellow"
            yield Line(Text(describe_replicas(replicas), style=style), 3)

    def _list_alarms(self) -> Iterator[Line]:
        newest = self._progress.alarms[-ALARMS_SHOWN:]
        for place, alarm in enumerate(newest, start=1):
            text = f"! step {alarm['step']}: {alarm.get('said', '')}"
            yield Line(Text(text, style="bold yellow"), 1 if place == len(newest) else 3)


def describe_replicas(replicas: Sequence[ReplicaStatus]) -> str:
    """Describe each replica. Of more than `MOST_REPLICAS`, describe only the number in each state, the oldest weight
    version and the total number of requests."""
    if len(replicas) <= MOST_REPLICAS:
        return "; ".join(
            f"replica {status.number}: {status.state}"
            + (f", weights v{status.version}, {status.requests} requests" if status.state == "up" else "")
            for status in replicas
        )
    states = [status.state for status in replicas]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    oldest = min((status.version for status in replicas if status.version is not None), default=None)
    weights = "" if oldest is None else f", weights from v{oldest} on"
    return f"replicas: {counts}{weights}, {sum(status.requests for status in replicas)} requests"


def format_duration(seconds: float | None) -> str:
    """Return a duration in words: `"46 s"`; from two minutes on `"12 min 5 s"`; from two hours on `"3 h 5 min"`."""
    if seconds is None:
        return "?"
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600:,} h {whole % 3600 // 60} min"
