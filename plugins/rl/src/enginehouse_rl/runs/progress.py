"""Shows a run while it runs: by a live display on a terminal, and elsewhere by a line from time to time."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from rich.console import Console
from rich.live import Live

from enginehouse_rl.runs.display import Display, format_duration
from enginehouse_rl.runs.history import History
from enginehouse_rl.runs.jsonlines import read_whole_lines
from enginehouse_rl.runs.observer import Observer
from enginehouse_rl.runs.validations import format_digits, format_figure

if TYPE_CHECKING:
    from typing import Self

    from enginehouse.fleet.replica import ReplicaStatus
    from enginehouse_rl.runs.events import Emit

REFRESHES_PER_SECOND = 4
LINES_A_RUN = 20
SECONDS_BETWEEN_LINES = 60.0
"""Without a terminal, a run prints lines for about `LINES_A_RUN` of its steps. It also prints a line for a step that
ends more than this many seconds after the last line."""

log = logging.getLogger(__name__)

T = TypeVar("T")

Mode = Literal["live", "lines", "quiet", "json"]


class _Output(Console):
    """The standard output of a run. If its reader goes away or its disk is full, the run continues without output."""

    def on_broken_pipe(self) -> None:
        self.give_up("its reader went away")

    def give_up(self, reason: object) -> None:
        """Write nothing from now on, because buffered output would fail again, at the latest when the program ends."""
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.file.fileno())
        os.close(nowhere)
        log.warning("standard output accepts no more text (%s): the run continues without it", reason)


class Progress(Observer):
    """Shows the progress of a run. It is a context manager, which restores the terminal however its block ends.

    On a terminal, a separate thread draws the display four times a second.

    Args:
        mode: `"live"`, `"lines"`, `"quiet"` or `"json"`. None: live if the console is a terminal that can move its
            cursor, otherwise lines.
        console: The console to write to; None: standard output.
        emit: Writes each event in the mode `"json"`, in which nothing else is written.

    Attributes:
        state: Returns the current activity in a few words, or an empty text. Called whenever something is shown.
        replicas: Returns the states of the rollout replicas. Called whenever something is shown, from another thread.
    """

    state: Callable[[], str] | None = None
    replicas: Callable[[], Sequence[ReplicaStatus]] | None = None

    def __init__(
        self, title: str = "", mode: Mode | None = None, console: Console | None = None, emit: Emit | None = None
    ):
        self.console = console or _Output(highlight=False)
        lives = self.console.is_terminal and not self.console.is_dumb_terminal
        self.mode: Mode = mode or ("live" if lives else "lines")
        self._emit = emit or (lambda event, **content: None)
        self.title = title
        self.history = History()
        self.alarms: list[Mapping[str, Any]] = []
        self._task = ""
        self._task_started = 0.0
        self._last_line = time.perf_counter()
        self._part = "", 0, 0  # the name of the parts, the number so far, the number of all
        self._arrival = ""
        self._live: Live | None = None
        self._has_noted_no_calls = False

    def __enter__(self) -> Self:
        if self.mode == "live":
            display = Display(self)
            self._live = Live(
                console=self.console,
                get_renderable=lambda: display,
                refresh_per_second=REFRESHES_PER_SECOND,
                transient=True,
            )
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove the display and restore the terminal."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    @contextmanager
    def task(self, name: str) -> Iterator[None]:
        """Show that a task without steps runs, until the next task, `start` or the end of the block."""
        self._end_task()
        self._task, self._task_started = name, time.perf_counter()
        self._show_line(f"{name} ...")
        try:
            yield
        finally:
            self._task = ""

    def report_arrival(self, what: str) -> None:
        """Show that a part of the task is ready: in a line, or on a terminal after the task's name."""
        self._arrival = f"{what}: ready after {time.perf_counter() - self._task_started:.1f} s"
        self._show_line(f"  {self._arrival}")

    def count(self, parts: Iterable[T], what: str, of: int, size: Callable[[T], int]) -> Iterator[T]:
        """Yield the parts of a batch as they are generated, and show how many items of the batch there are so far.

        Args:
            what: The noun of the items: `"samples"`.
            of: The number of items of the whole batch.
            size: Returns the number of items in a part.
        """
        self._part = what, 0, of
        try:
            for part in parts:
                self._part = what, self._part[1] + size(part), of
                if time.perf_counter() - self._last_line > SECONDS_BETWEEN_LINES:
                    self._show_now_and_then(self.part)
                yield part
        finally:
            self._part = "", 0, 0

    def start(self, steps: int, done: int = 0) -> None:
        """End the task, and begin the steps of the run. Earlier processes took `done` of the `steps`."""
        self._end_task()
        self._last_line = time.perf_counter()
        self.history.start(steps, done)
        self._emit("start", steps=steps, done=done)

    def step_finished(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record a step's metrics, and show reward, loss, accuracy, gradient, entropy, speed, times and failures."""
        self.history.add(step, metrics)
        self._emit("step", step=step, metrics=metrics)
        if self.mode != "lines":
            return
        interval = max(1, self.history.steps // LINES_A_RUN)
        now = time.perf_counter()
        if step % interval == 0 or step in (1, self.history.steps) or now - self._last_line > SECONDS_BETWEEN_LINES:
            self._show_now_and_then(self._format_line())

    def remember(self, directory: Path) -> None:
        """Read the rows that earlier processes of a resumed run wrote, without showing them. Call it before `start`."""
        for name, add in (("metrics", self.history.add), ("validation", self.history.validations.add)):
            for row in read_whole_lines(directory / f"{name}.jsonl"):
                row.pop("elapsed_seconds", None)
                add(row.pop("step"), {metric: value for metric, value in row.items() if value is not None})

    def validated(self, step: int, metrics: Mapping[str, float], how: str = "") -> None:
        """Record a validation's metrics, and show them. If the model became worse, a terminal keeps these lines.

        `how` describes in a word or two how responses were sampled: `"greedy"`.
        """
        validations = self.history.validations
        validations.add(step, metrics, how)
        self._emit("validation", step=step, metrics=metrics, how=how)
        show = self.note if validations.has_worsened() else self._show_line
        for line in validations.lines():
            show(line)
        if validations.lacks_tool_calls() and not self._has_noted_no_calls:
            self._has_noted_no_calls = True
            self.note(
                "no response called a tool (samples/ has the responses). If the model does not know the format of "
                "tool calls, train it first with `enginehouse sft`"
            )

    def alarmed(self, alarm: Mapping[str, Any]) -> None:
        """Record an alarm, which is a row of `alarms.jsonl`. Nothing is printed, because the log shows the alarm."""
        self.alarms.append(alarm)
        self._emit("alarm", **alarm)

    def checkpoint_saved(self, step: int, path: str, what: str) -> None:
        """Report that a model or a checkpoint was saved."""
        self._emit("saved", step=step, what=what, path=path)

    def note(self, text: str) -> None:
        """Print a line that stays; on a terminal, above the display."""
        self._emit("note", text=text)
        if self.mode in ("live", "lines"):
            self.print(text)

    def _end_task(self) -> None:
        if self._task:
            self._show_line(f"{self._task}: done in {time.perf_counter() - self._task_started:.1f} s")
        self._task = self._arrival = ""

    def _show_line(self, text: str) -> None:
        if self.mode == "lines":
            self.print(text)

    def print(self, text: str) -> None:
        """Print text unchanged, in any mode, unless the output has failed."""
        try:
            self.console.out(text, highlight=False)
        except OSError as error:
            if not isinstance(self.console, _Output):
                raise
            self.console.give_up(error)

    def _show_now_and_then(self, text: str) -> None:
        self._last_line = time.perf_counter()
        self._show_line(text)

    # Display

    @property
    def task_name(self) -> str:
        return self._task

    @property
    def task_seconds(self) -> float | None:
        """Seconds since the task began; None without a task."""
        return time.perf_counter() - self._task_started if self._task else None

    @property
    def part(self) -> str:
        """Text that describes the finished part of the task; empty if unknown."""
        what, count, total = self._part
        if not total:
            return self._arrival
        return ", ".join(filter(None, (f"generating: {count:,} of {total:,} {what}", self.activity)))

    @property
    def activity(self) -> str:
        """Text that describes the current activity; empty if unknown."""
        return self.state() if self.state is not None else ""

    def list_figures(self) -> list[tuple[str, str, str, Sequence[float]]]:
        """List the run's metrics: the name, the last step's value, the mean if it is shown, and the values so far."""
        history, figures = self.history, list[tuple[str, str, str, Sequence[float]]]()
        for label, name in _FIGURES:
            value, mean = self._format_step_value(label)
            if value:
                figures.append((label, value, f"mean {mean}" if mean else "", history.series[name].points))
            if label == "reward" and (rewards := history.validations.rewards()):
                figures.append(("validation", format_figure(rewards[-1]), "", rewards))
        return figures

    def _format_step_value(self, label: str) -> tuple[str, str]:
        """Return a metric's value at the last step and its mean over the last steps, as text; both are empty if none of
        these steps has the metric."""
        name, recent = dict(_FIGURES)[label], self.history.recent()
        if (mean := self.history.now(name)) is None:
            return "", ""
        value = recent[-1].get(name, mean)
        if label == "tokens/s":
            return f"{value:,.0f}", ""
        return format_figure(value), format_figure(mean) if label in _AVERAGED and len(recent) > 1 else ""

    def describe_reward_failures(self) -> str:
        """Describe how many rewards failed in the last steps; empty if none did."""
        recent = self.history.recent()
        failures = sum(step.get("reward/failures", 0.0) for step in recent)
        return f"{failures:.0f} in {len(recent)} steps" if failures else ""

    def _format_line(self) -> str:
        history = self.history
        parts, number = [f"step {history.step:,}/{history.steps:,}"], len(history.recent())
        for label in _IN_LINES:
            value, mean = self._format_step_value(label)
            if value:
                parts.append(f"{label} {value}" + (f" (mean of {number}: {mean})" if mean else ""))
        if failures := self.describe_reward_failures():
            parts.append(f"reward failures {failures}")
        last = history.last[-1] if history.last else {}
        if failed := sum(value for name, value in last.items() if name.startswith("feed/failed_")):
            share = last.get("response/failed")
            parts.append(f"failed episodes {failed:.0f}" + (f" ({share:.0%} of the step's)" if share else ""))
        parts.append(f"{format_digits(1 / history.steps_per_second)} s a step" if history.steps_per_second else "")
        if seconds_left := history.seconds_left:
            parts.append(f"{format_duration(seconds_left)} left")
        return "  ".join(filter(None, parts))


_FIGURES = (
    ("reward", "reward/mean"),
    ("loss", "loss"),
    ("accuracy", "accuracy"),
    ("entropy", "entropy"),
    ("KL", "kl"),
    ("length", "response/tokens_mean"),
    ("gradient", "grad_norm"),
    ("tokens/s", "tokens_per_second"),
)
_IN_LINES = ("reward", "loss", "accuracy", "gradient", "entropy", "tokens/s")
"""The metrics in a line of text, in this order, each with its value at the last step."""
_AVERAGED = ("reward", "loss", "accuracy")
"""The metrics that also show their mean over the last steps."""
