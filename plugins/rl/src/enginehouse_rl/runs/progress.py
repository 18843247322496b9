"""What a run shows while it runs: a live display on a terminal, a line now and then elsewhere."""

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

from enginehouse_rl.runs.display import Display, clock
from enginehouse_rl.runs.history import History
from enginehouse_rl.runs.jsonlines import read_whole_lines
from enginehouse_rl.runs.observer import Observer
from enginehouse_rl.runs.validations import figure

if TYPE_CHECKING:
    from typing import Self

    from enginehouse.fleet.replica import ReplicaStatus
    from enginehouse_rl.runs.events import Emit

REFRESHES_PER_SECOND = 4
LINES_A_RUN = 20
SECONDS_BETWEEN_LINES = 60.0
"""Without a terminal a line is printed about `LINES_A_RUN` times a run, and at least this often while steps end."""

log = logging.getLogger(__name__)

T = TypeVar("T")

Mode = Literal["live", "lines", "quiet", "json"]


class _Output(Console):
    """Standard output of a run, which goes on without it where its reader went away or its disk is full."""

    def on_broken_pipe(self) -> None:
        self.give_up("its reader went away")

    def give_up(self, why: object) -> None:
        """Write nothing any more: what is not written yet would fail again, at the end of the program at the latest."""
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.file.fileno())
        os.close(nowhere)
        log.warning("standard output takes nothing any more (%s): the run goes on without it", why)


class Progress(Observer):
    """Shows a run's progress. A context manager: the terminal is as it was when it ends, however it ends.

    `step_finished` only takes figures in. On a terminal a thread of the display's own draws them, four times a second.

    Args:
        title: the run's name.
        mode: `"live"`, `"lines"`, `"quiet"` or `"json"`; None: live if the console is a terminal that can move its
            cursor, else lines.
        console: where to write; None: standard output.
        emit: told of each event, in the mode `"json"`, and nothing else is written then.

    Attributes:
        history: the figures taken in.
        alarms: those taken in.
        state: says what is under way right now, in a few words or none; asked whenever something is shown.
        replicas: says how the rollout replicas are; likewise, and from another thread.
        roles: what runs, a few words a role.
    """

    state: Callable[[], str] | None = None
    replicas: Callable[[], Sequence[ReplicaStatus]] | None = None

    def __init__(
        self,
        title: str = "",
        mode: Mode | None = None,
        console: Console | None = None,
        emit: Emit | None = None,
    ):
        self.console = console or _Output(highlight=False)
        lives = self.console.is_terminal and not self.console.is_dumb_terminal
        self.mode: Mode = mode or ("live" if lives else "lines")
        self._emit = emit or (lambda event, **content: None)
        self.roles: list[str] = []
        self.title = title
        self.history = History()
        self.alarms: list[Mapping[str, Any]] = []
        self._task = ""
        self._task_started = 0.0
        self._last_line = time.perf_counter()
        self._part = "", 0, 0  # what is counted, how many have come, of how many
        self._came = ""
        self._live: Live | None = None
        self._told_of_no_call = False

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

    def came(self, what: str) -> None:
        """Show that a part of what is under way is there: in a line, or on a terminal behind the task's name."""
        self._came = f"{what}: there after {time.perf_counter() - self._task_started:.1f} s"
        self._line(f"  {self._came}")

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
                    self._say(self.part)
                yield part
        finally:
            self._part = "", 0, 0

    def start(self, steps: int, done: int = 0) -> None:
        """Say how many steps there will be, and how many of them are done; what `task` announced is done."""
        self._task_is_done()
        self._last_line = time.perf_counter()
        self.history.start(steps, done)
        self._emit("start", steps=steps, done=done)

    def step_finished(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take in a step's metrics; shown are reward, loss, accuracy, gradient, entropy, speed, times and failures."""
        self.history.add(step, metrics)
        self._emit("step", step=step, metrics=metrics)
        if self.mode != "lines":
            return
        every = max(1, self.history.steps // LINES_A_RUN)
        now = time.perf_counter()
        if step % every == 0 or step in (1, self.history.steps) or now - self._last_line > SECONDS_BETWEEN_LINES:
            self._say(self._as_line())

    def remember(self, directory: Path) -> None:
        """Take in, before `start`, what a run that is resumed has written to its directory; nothing is shown."""
        for name, add in (("metrics", self.history.add), ("validation", self.history.validations.add)):
            for row in read_whole_lines(directory / f"{name}.jsonl"):
                row.pop("elapsed_seconds", None)
                add(row.pop("step"), {metric: value for metric, value in row.items() if value is not None})

    def validated(self, step: int, metrics: Mapping[str, float], how: str = "") -> None:
        """Take in a validation's metrics, and say them: lines that stay on a terminal too if the model became worse.

        Args:
            step: after which step; 0 before the first.
            metrics: `validation/reward` and others.
            how: responses were drawn, in a word or two: `"greedy"`.
        """
        validations = self.history.validations
        validations.add(step, metrics, how)
        self._emit("validation", step=step, metrics=metrics, how=how)
        say = self.note if validations.worse_anywhere() else self._line
        for line in validations.lines():
            say(line)
        if validations.no_tool_called() and not self._told_of_no_call:
            self._told_of_no_call = True
            self.note(
                "no response called a tool: samples/ has what the model said; one that does not know the form of calls "
                "learns it by `enginehouse sft` first"
            )

    def alarmed(self, alarm: Mapping[str, Any]) -> None:
        """Take in an alarm, a row of `alarms.jsonl`; the log says it too."""
        self.alarms.append(alarm)
        self._emit("alarm", **alarm)

    def checkpoint_saved(self, step: int, path: str, what: str) -> None:
        """Take in that a model or a checkpoint was saved."""
        self._emit("saved", step=step, what=what, path=path)

    def note(self, text: str) -> None:
        """Print a line that stays, above the display on a terminal."""
        self._emit("note", text=text)
        if self.mode in ("live", "lines"):
            self.print(text)

    def _task_is_done(self) -> None:
        if self._task:
            self._line(f"{self._task}: done in {time.perf_counter() - self._task_started:.1f} s")
        self._task = self._came = ""

    def _line(self, text: str) -> None:
        if self.mode == "lines":
            self.print(text)

    def print(self, text: str) -> None:
        """Print lines as they stand, whatever the mode, if the output still takes any."""
        try:
            self.console.out(text, highlight=False)
        except OSError as error:
            if not isinstance(self.console, _Output):
                raise
            self.console.give_up(error)

    def _say(self, text: str) -> None:
        self._last_line = time.perf_counter()
        self._line(text)

    # What is shown

    @property
    def task_name(self) -> str:
        """What is under way that has no steps; empty if nothing is."""
        return self._task

    @property
    def task_seconds(self) -> float | None:
        """For how long it has been; None if nothing is."""
        return time.perf_counter() - self._task_started if self._task else None

    @property
    def part(self) -> str:
        """How much has come of what is under way, in words; empty if nothing says so."""
        what, come, of = self._part
        return ", ".join(filter(None, (f"{come:,} of {of:,} {what}", self.under_way))) if of else self._came

    @property
    def under_way(self) -> str:
        """What is under way right now, in words."""
        return self.state() if self.state is not None else ""

    def figures(self) -> list[tuple[str, str, Sequence[float]]]:
        """The run's figures: of each its name, its mean over the last steps, and its way."""
        history, shown = self.history, list[tuple[str, str, Sequence[float]]]()
        for label, name in _FIGURES:
            if (value := history.now(name)) is not None:
                said = f"{value:,.0f}" if label == "tokens/s" else figure(value)
                shown.append((label, said, history.series[name].points))
            if label == "reward" and (rewards := history.validations.rewards()):
                shown.append(("validation", figure(rewards[-1]), rewards))
        return shown

    def _of_the_step(self, label: str) -> str:
        """The last step's own value of a figure, with the mean over the last steps where a summary compares means."""
        name, recent = dict(_FIGURES)[label], self.history.recent()
        if (mean := self.history.now(name)) is None:
            return ""
        value = recent[-1].get(name, mean)
        if label == "tokens/s":
            return f"{value:,.0f}"
        averaged = label in _AVERAGED and len(recent) > 1
        return figure(value) + (f" (mean of {len(recent)}: {figure(mean)})" if averaged else "")

    def reward_failures(self) -> str:
        """How many rewards failed in the last steps, in words; empty if none did."""
        recent = self.history.recent()
        failures = sum(step.get("reward/failures", 0.0) for step in recent)
        return f"{failures:.0f} in {len(recent)} steps" if failures else ""

    def _as_line(self) -> str:
        history = self.history
        parts = [f"step {history.step}/{history.steps}"]
        parts += [f"{label} {said}" for label in _IN_LINES if (said := self._of_the_step(label))]
        if failures := self.reward_failures():
            parts.append(f"reward failures {failures}")
        last = history.last[-1] if history.last else {}
        if failed := sum(value for name, value in last.items() if name.startswith("feed/failed_")):
            share = last.get("response/failed")
            parts.append(f"failed episodes {failed:.0f}" + (f" ({share:.0%} of the step's)" if share else ""))
        parts.append(f"{1 / history.steps_per_second:.3g} s/step" if history.steps_per_second else "")
        left = history.seconds_left
        if left:
            parts.append(f"{clock(left)} left")
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
"""Figures of a plain line, in its order: the step's own values."""
_AVERAGED = ("reward", "loss", "accuracy")
"""Those that have their mean over the last steps beside them."""
