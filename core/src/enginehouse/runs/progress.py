"""What a run shows while it runs: a live display on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from enginehouse.runs.history import History
from enginehouse.runs.validations import figure

if TYPE_CHECKING:
    from typing import Self

    from enginehouse.runs.directory import Earlier

REFRESHES_PER_SECOND = 4
LINES_A_RUN = 20
SECONDS_BETWEEN_LINES = 60.0
"""Without a terminal a line is printed about `LINES_A_RUN` times a run, and at least this often while steps end."""

T = TypeVar("T")

Mode = Literal["live", "lines", "quiet"]


class Progress:
    """Shows a run's progress. A context manager: the terminal is as it was when it ends, however it ends.

    `update` only takes figures in. On a terminal a thread of the display's own draws them, four times a second.

    Args:
        title: the run's name.
        mode: `"live"`, `"lines"` or `"quiet"`; None: live if the console is a terminal, else lines.
        console: where to write; None: standard output.

    Attributes:
        history: the figures taken in.
        alarms: those taken in.
        state: says what is under way right now, in a few words or none; asked whenever something is shown.
    """

    state: Callable[[], str] | None = None

    def __init__(self, title: str = "", mode: Mode | None = None, console: Console | None = None):
        self.console = console or Console(highlight=False)
        self.mode: Mode = mode or ("live" if self.console.is_terminal else "lines")
        self.title = title
        self.history = History()
        self.alarms: list[Mapping[str, Any]] = []
        self._task = ""
        self._task_started = 0.0
        self._last_line = time.perf_counter()
        self._part = "", 0, 0  # what is counted, how many have come, of how many
        self._spinner = Spinner("dots")
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self.mode == "live":
            self._live = Live(
                console=self.console,
                get_renderable=self._render,
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
        """Take the display away and give the terminal back; a second call does nothing."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    @contextmanager
    def task(self, what: str) -> Iterator[None]:
        """Show that something without steps is under way, until the next task, `start` or the end of the block."""
        self._task_is_done()
        self._task, self._task_started = what, time.perf_counter()
        self._line(f"{what} ...")
        try:
            yield
        finally:
            self._task = ""

    def counted(self, parts: Iterable[T], what: str, of: int, size: Callable[[T], int]) -> Iterator[T]:
        """The parts of something that takes a while, one by one; how much of it has come is shown meanwhile.

        Args:
            parts: what comes.
            what: what is counted.
            of: how many there will be.
            size: how many a part has.
        """
        self._part = what, 0, of
        try:
            for part in parts:
                self._part = what, self._part[1] + size(part), of
                if time.perf_counter() - self._last_line > SECONDS_BETWEEN_LINES:
                    self._say(self._part_as_text())
                yield part
        finally:
            self._part = "", 0, 0

    def start(self, steps: int, done: int = 0) -> None:
        """Say how many steps there will be, and how many of them are done; what `task` announced is done."""
        self._task_is_done()
        self._last_line = time.perf_counter()
        self.history.start(steps, done)

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take in a step's metrics; shown are reward, loss, accuracy, gradient, entropy, speed, times and failures."""
        self.history.add(step, metrics)
        if self.mode != "lines":
            return
        every = max(1, self.history.steps // LINES_A_RUN)
        now = time.perf_counter()
        if step % every == 0 or step in (1, self.history.steps) or now - self._last_line > SECONDS_BETWEEN_LINES:
            self._say(self._as_line())

    def remember(self, earlier: Earlier) -> None:
        """Take in, before `start`, what a run that is resumed has written; nothing is shown."""
        for row in earlier.metrics:
            self.history.add(row["step"], figures(row))
        for row in earlier.validations:
            self.history.validations.add(row["step"], figures(row))

    def validated(self, step: int, metrics: Mapping[str, float], how: str = "") -> None:
        """Take in a validation's metrics, and say them: lines that stay on a terminal too if the model became worse.

        Args:
            step: after which step; 0 before the first.
            metrics: `validation/reward` and others.
            how: responses were drawn, in a word or two: `"greedy"`.
        """
        validations = self.history.validations
        validations.add(step, metrics, how)
        say = self.note if validations.worse_anywhere() else self._line
        for line in validations.lines():
            say(line)

    def alarmed(self, alarm: Mapping[str, Any]) -> None:
        """Take in an alarm, a row of `alarms.jsonl`; the log says it too."""
        self.alarms.append(alarm)

    def note(self, text: str) -> None:
        """Print a line that stays, above the display on a terminal."""
        if self.mode != "quiet":
            self.console.print(text, soft_wrap=True, markup=False, highlight=False)

    def _task_is_done(self) -> None:
        if self._task:
            self._line(f"{self._task}: done in {time.perf_counter() - self._task_started:.1f} s")
        self._task = ""

    def _line(self, text: str) -> None:
        if self.mode == "lines":
            self.console.print(text, soft_wrap=True, markup=False, highlight=False)

    def _say(self, text: str) -> None:
        self._last_line = time.perf_counter()
        self._line(text)

    def _part_as_text(self) -> str:
        what, come, of = self._part
        return ", ".join(filter(None, (f"{come:,} of {of:,} {what}", self._state())))

    def _state(self) -> str:
        return self.state() if self.state is not None else ""

    def _as_line(self) -> str:
        history = self.history
        parts = [f"step {history.step}/{history.steps}"]
        parts += [f"{label} {said}" for label, said in self._headline()]
        parts.append(f"{1 / history.steps_per_second:.3g} s/step" if history.steps_per_second else "")
        left = history.seconds_left
        if left:
            parts.append(f"{clock(left)} left")
        return "  ".join(filter(None, parts))

    def _headline(self) -> list[tuple[str, str]]:
        history = self.history
        shown = []
        for label, name in (
            ("reward", history.named("reward/mean")),
            ("loss", history.named("loss")),
            ("accuracy", history.named("accuracy")),
            ("gradient", history.named("grad_norm")),
            ("entropy", history.named("entropy")),
            ("tokens/s", history.named("tokens_per_second")),
        ):
            value = history.now(name) if name else None
            if value is not None:
                shown.append((label, f"{value:,.0f}" if label == "tokens/s" else figure(value)))
        recent = history.recent()
        if failures := sum(step.get("reward/failures", 0.0) for step in recent):
            shown.append(("reward failures", f"{failures:.0f} in {len(recent)} steps"))
        return shown

    def _render(self) -> RenderableType:
        history = self.history
        if self._task:
            part = f", {self._part_as_text()}" if self._part[2] else ""
            self._spinner.update(text=Text(f"{self._task} ({time.perf_counter() - self._task_started:.0f} s){part}"))
            return self._spinner
        if not history.steps:
            return Text("")
        bar = Table.grid(padding=(0, 1))
        bar.add_row(
            Text(self.title, style="bold"),
            ProgressBar(total=history.steps, completed=history.step, width=32),
            Text(f"step {history.step}/{history.steps}"),
            Text(f"{clock(history.seconds)} gone, {clock(history.seconds_left)} left", style="dim"),
        )
        if self._part[2]:
            _, come, of = self._part
            bar.add_row(Text(""), ProgressBar(total=of, completed=come, width=32), Text(self._part_as_text()), Text(""))
        rows: list[RenderableType] = [bar]
        headline = self._headline()
        if headline:
            rows.append(
                Text.assemble(*(part for one in headline for part in ((one[0] + " ", "dim"), (one[1] + "   ", "bold"))))
            )
        if not self._part[2] and (state := self._state()):
            rows.append(Text(state, style="dim"))
        phases = "  ".join(f"{name} {seconds:.3g}" for name, seconds in history.phases())
        if phases:
            rows.append(Text(f"seconds a step: {phases}", style="dim"))
        if history.validations:
            rows += [Text(line, style="dim") for line in history.validations.lines()]
        return Group(*rows)


def figures(row: Mapping[str, Any]) -> dict[str, float]:
    """The metrics in a row of a file: without what it says besides, and without those that were not finite."""
    return {name: value for name, value in row.items() if name not in ("step", "elapsed_seconds") and value is not None}


def clock(seconds: float | None) -> str:
    """A duration as hours, minutes and seconds."""
    return "?" if seconds is None else str(timedelta(seconds=round(seconds)))
