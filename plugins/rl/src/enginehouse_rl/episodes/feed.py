"""The feed hands out groups of scored episodes in their order of arrival.

It plays tasks on an event loop in another thread, so that the training loop can be synchronous code.
`enginehouse_rl.episodes.staleness` decides which groups begin and which groups a step takes.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import queue
import statistics
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from enginehouse.controller.launchers.event_loop import EventLoop
from enginehouse.errors import EnginehouseError
from enginehouse_rl.episodes.failures import describe_error
from enginehouse_rl.episodes.staleness import StalenessWindow

if TYPE_CHECKING:
    from enginehouse.engines.environment import Task
    from enginehouse_rl.episodes.runner import TaskRunner
    from enginehouse_rl.episodes.scored_group import ScoredGroup
    from enginehouse_rl.episodes.tasks import Tasks

MOST_REFUSED = 10
"""Limit on consecutive groups that are not kept, as a multiple of the number of groups of a step. At the limit, the
feed ends the run. A group is not kept if the filter rejects it or the failure policy drops it."""
QUIET_SECONDS = 10.0
"""Seconds after which a caller that waits for episodes learns that none has arrived, so that it can report this."""
REASONS = ("refused", "dropped", "left_over")
"""Reasons why a group is not trained on: a filter rejected it; the failure policy left no episode of it; or it came too
late for any step, so its task is repeated."""


class NoGroupKept(EnginehouseError):
    """Too many consecutive groups cannot be trained on, because the filter rejected them or they failed."""


class Feed:
    """Plays tasks and hands out the resulting groups, one step's groups at a time.

    Args:
        loop: Event loop on which tasks are played; nothing else may block it.
        schedule: Decides how many groups begin and which groups a step takes.

    Attributes:
        version: Version of the weights at the start of the latest step.
    """

    def __init__(self, loop: EventLoop, tasks: Tasks, runner: TaskRunner, schedule: StalenessWindow):
        self._loop, self._tasks, self._runner, self._schedule = loop, tasks, runner, schedule
        self._samples = runner.samples
        self._playing: dict[int, asyncio.Task[None]] = {}
        self._drawing: set[int] = set()  # tasks in `_playing` whose scoring has not begun
        self._scored: dict[int, ScoredGroup] = {}
        self._error: BaseException | None = None
        self.version = self._missing = self._remaining = 0
        self._begun: int | None = None  # episodes of a step that began and that nobody waits for yet
        self._unused: list[ScoredGroup] = []  # groups rejected or dropped in a row since one was kept
        self._counts: Counter[str] = Counter()
        self._left_over: Counter[int] = Counter()  # how often each task was left over since it was trained on
        self._messages: queue.SimpleQueue[int | list[ScoredGroup] | BaseException | None] = queue.SimpleQueue()

    # From the loop of steps

    def begin(self, version: int, remaining: int) -> None:
        """Begin a step by starting to generate its groups. Call `draw` and `take` afterwards.

        Args:
            version: Version of the weights at the start of generation; newer weights may arrive meanwhile.
            remaining: Number of groups to train on until the run ends, including the groups of this step.
        """
        self._begun = self._loop.call(self._begin_step, version, remaining)

    def draw(self, version: int, remaining: int) -> Iterator[int]:
        """Wait for a step's groups. Calls `begin` with these arguments, unless `begin` was already called.

        Yields:
            The number of the step's episodes that were generated since the last yield. If none is generated for
            `QUIET_SECONDS`, this number is 0. The iterator ends when all episodes of the step are generated, whether or
            not they are scored.

        Raises:
            NoGroupKept: The filter rejected, or the failure policy dropped, too many consecutive groups
                (`MOST_REFUSED`).
            EnginehouseError: Another error ended the feed; see `EpisodeRunner.play`.
        """
        if self._begun is None:
            self.begin(version, remaining)
        missing, self._begun = self._begun or 0, None
        while (message := self._await_message()) is not None:
            if isinstance(message, BaseException):
                raise message
            if isinstance(message, int):  # more may be generated than the step takes
                missing, message = missing - message, min(message, missing)
                yield max(message, 0)

    def _await_message(self) -> int | list[ScoredGroup] | BaseException | None:
        try:
            return self._messages.get(timeout=QUIET_SECONDS)
        except queue.Empty:
            return 0

    def take(self) -> list[ScoredGroup]:
        """Return the step's groups in the order of their tasks, once they are scored. Raises the same errors as
        `draw`."""
        while not isinstance(message := self._messages.get(), list):
            if isinstance(message, BaseException):
                raise message
        return message

    def state(self) -> dict[str, Any]:
        """Return plain data from which `Tasks.restore` resumes.

        It names the next tasks, and the tasks that were handed out but not trained on. Tasks of the groups that were
        taken last count as trained on.
        """
        return self._loop.call(lambda: self._tasks.state(self._schedule.open_groups))

    def metrics(self) -> dict[str, float]:
        """Return the number of groups in progress. Return also, since the last call and by reason, the number of groups
        that were not trained on, and the number of episodes that failed (`EpisodeRunner.metrics`)."""
        return self._loop.call(self._take_metrics)

    def close(self) -> None:
        """Cancel all tasks in progress."""
        self._loop.call(self._cancel)

    # On the event loop

    def _begin_step(self, version: int, remaining: int) -> int:
        """Begin a step and return the number of episodes that are still to be generated."""
        self.version, self._missing, self._remaining = version, self._schedule.groups, remaining
        missing = self._samples * (self._schedule.groups - len(self._scored))
        self._advance()
        return missing

    def _advance(self) -> None:
        """Begin the tasks that may begin. If a caller waits for a step's groups, hand over the groups once all are
        available. If an error ended the feed, hand over the error."""
        if self._error is None:
            try:
                for task in self._tasks.next(self._schedule.count_room(self._missing, self._remaining)):
                    self._begin(task)
            except Exception as error:
                self._fail(error)
        if not self._missing:
            return
        if self._error is not None:
            self._messages.put(self._error)
            self._missing = 0
            return
        chosen = self._schedule.choose(self.version)
        if chosen is not None or not self._drawing:
            self._messages.put(None)  # the caller need not wait for episodes in progress
        if chosen is not None:
            self._remaining -= len(chosen)
            self._missing = 0
            self._messages.put([self._take_group(serial) for serial in chosen])
            self._leave_over(self._schedule.find_overdue(self.version + 1))
            self._advance()

    def _take_group(self, serial: int) -> ScoredGroup:
        return replace(self._scored.pop(serial), left_over=self._left_over.pop(serial, 0))

    def _begin(self, task: Task) -> None:
        self._schedule.begin(task.serial, self.version)
        self._drawing.add(task.serial)
        self._playing[task.serial] = asyncio.get_running_loop().create_task(self._play_task(task))

    async def _play_task(self, task: Task) -> None:
        """Generate a group, then keep or reject it."""
        serial = task.serial
        try:
            group = await self._runner.play_group(task, lambda: self._note_drawn(serial))
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._forget(serial)
            self._fail(error)
        else:
            if self._playing.get(serial) is not asyncio.current_task():  # it suppressed its cancellation
                return
            self._forget(serial)
            if group.kept:
                self._unused.clear()
                self._scored[serial] = group
                self._schedule.end(serial)
            else:
                self._refuse(group)
        self._advance()

    def _note_drawn(self, serial: int) -> None:
        """Record that a group's episodes are generated and are being scored."""
        if serial in self._drawing:
            self._drawing.discard(serial)
            if self._missing:
                self._messages.put(self._samples)
                if not self._drawing:
                    self._messages.put(None)

    def _forget(self, serial: int) -> None:
        self._note_drawn(serial)
        self._playing.pop(serial, None)

    def _refuse(self, group: ScoredGroup) -> None:
        self._counts["refused" if group.rewards else "dropped"] += 1
        self._schedule.give_up(group.task.serial)
        self._unused.append(group)
        if len(self._unused) >= MOST_REFUSED * self._schedule.groups:
            self._fail(_make_no_group_kept(self._unused, self._runner.last_error))

    def _leave_over(self, serials: Sequence[int]) -> None:
        """Drop groups that come too late for any step, and repeat their tasks. Without the repetition, the run would
        rarely train on long responses."""
        self._tasks.repeat(serials)
        self._left_over.update(serials)
        self._counts["left_over"] += len(serials)
        for serial in serials:
            self._schedule.give_up(serial)
            self._scored.pop(serial, None)
            self._drawing.discard(serial)
            if (running := self._playing.pop(serial, None)) is not None:
                running.cancel()

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self._cancel()

    def _cancel(self) -> None:
        for running in self._playing.values():
            running.cancel()

    def _take_metrics(self) -> dict[str, float]:
        counts, self._counts = self._counts, Counter()
        in_progress = float(len(self._schedule.open_groups))
        figures = {reason: float(counts[reason]) for reason in REASONS} | self._runner.metrics()
        return {"feed/under_way": in_progress} | {f"feed/{name}": value for name, value in figures.items()}


class RunningTasks:
    """Plays tasks concurrently, and begins when it is created. Iterating over it yields each group as soon as the group
    ends."""

    def __init__(self, loop: EventLoop, tasks: Sequence[Task], play: Callable[[Task], Awaitable[ScoredGroup]]):
        self._messages: queue.SimpleQueue[ScoredGroup | BaseException | None] = queue.SimpleQueue()
        self._all = loop.submit(self._play(tasks, play))

    async def _play(self, tasks: Sequence[Task], play: Callable[[Task], Awaitable[ScoredGroup]]) -> None:
        async def play_task(task: Task) -> None:
            self._messages.put(await play(task))

        try:
            async with asyncio.TaskGroup() as group:
                for task in tasks:
                    group.create_task(play_task(task))
        except* Exception as errors:
            self._messages.put(errors.exceptions[0])
        else:
            self._messages.put(None)

    def __iter__(self) -> Iterator[ScoredGroup]:
        """Yield the groups that no earlier iteration yielded. If an error ended the tasks, raise it."""
        while (group := self._messages.get()) is not None and not isinstance(group, BaseException):
            yield group
        self._messages.put(group)  # for the next caller
        if group is not None:
            raise group

    @property
    def is_ended(self) -> bool:
        """True if all tasks have ended."""
        return self._all.done()

    def wait(self, seconds: float) -> bool:
        return bool(concurrent.futures.wait([self._all], seconds).done)

    def cancel(self) -> None:
        """Cancel all tasks. Do not iterate afterwards."""
        self._all.cancel()


def _make_no_group_kept(groups: Sequence[ScoredGroup], last: BaseException | None) -> NoGroupKept:
    """Make the error for the case that all `groups` were rejected or dropped. `last` is the latest failure."""
    refused, problems = [group for group in groups if group.rewards], []
    if refused:
        rewards = [group.rewards for group in refused]
        equal = sum(len(set(group_rewards)) == 1 for group_rewards in rewards)
        flat = [reward for group_rewards in rewards for reward in group_rewards]
        problems.append(
            f"rollout.keep rejected {len(refused)} groups. In {equal} of these groups, all rewards are equal. The "
            f"rewards range from {min(flat):g} to {max(flat):g}, with a mean of {statistics.fmean(flat):.3g}. Are the "
            "prompts too easy or too hard, or is the temperature too low? A larger rollout.samples_per_prompt makes "
            "differences more likely"
        )
    if dropped := len(groups) - len(refused):
        cause = "the environment returned no episode" if last is None else f"latest failure: {describe_error(last)}"
        problems.append(f"{dropped} groups failed and were dropped (rollout.on_failure); {cause}")
    error = NoGroupKept(f"{len(groups)} groups in a row cannot be trained on: {'; '.join(problems)}")
    error.__cause__ = last if dropped else None
    return error
