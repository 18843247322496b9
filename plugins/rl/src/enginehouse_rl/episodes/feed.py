"""Whole, scored groups in order of arrival: what a step trains on, and what is drawn while it trains.

The feed plays tasks on an event loop of its own, in a thread; the loop of steps stays plain code and takes from it.
Which groups are begun, and which are taken, is `enginehouse_rl.episodes.staleness`.
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
"""So many times the groups of a step may be refused by a filter or dropped, one after another, before the feed gives
up."""
QUIET_SECONDS = 10.0
"""Who waits for episodes hears so often that there are none yet, and may say so."""
REASONS = ("refused", "dropped", "left_over")
"""Why a group is not trained on: a filter refused it; no episode of it was left, by the failure policy; it was one more
than needed, and its task comes again."""


class NoGroupKept(EnginehouseError):
    """None of the groups is trained on: a filter keeps none, or all fail."""


class Feed:
    """Plays tasks, and hands out what came of them, a step's groups at a time.

    Args:
        loop: where tasks are played; nothing else may hold it up.
        tasks: where they come from.
        runner: makes their episodes.
        schedule: how many groups are begun, and which are taken.

    Attributes:
        version: of the weights that the step that was begun last is drawn from.
    """

    def __init__(self, loop: EventLoop, tasks: Tasks, runner: TaskRunner, schedule: StalenessWindow):
        self._loop, self._tasks, self._runner, self._schedule = loop, tasks, runner, schedule
        self._samples = runner.samples
        self._playing: dict[int, asyncio.Task[None]] = {}
        self._drawing: set[int] = set()  # of those that play: those that have not begun to be scored
        self._ended: dict[int, ScoredGroup] = {}
        self._error: BaseException | None = None
        self.version = self._wanted = self._left = 0
        self._begun: int | None = None  # episodes of the step that was begun and is not waited for yet
        self._in_vain: list[ScoredGroup] = []  # refused or dropped, one after another, since one was kept
        self._counts: Counter[str] = Counter()
        self._left_over: Counter[int] = Counter()  # how often, by task that was not trained on since
        self._messages: queue.SimpleQueue[int | list[ScoredGroup] | BaseException | None] = queue.SimpleQueue()

    # From the loop of steps

    def begin(self, version: int, left: int) -> None:
        """Begin a step: have its groups drawn. `draw` and `take` come next.

        Args:
            version: of the weights that they are drawn from, or later ones.
            left: groups to be trained on until the run ends, this step's included.
        """
        self._begun = self._loop.call(self._begin_step, version, left)

    def draw(self, version: int, left: int) -> Iterator[int]:
        """Wait for a step's groups, which are begun here if they were not. Arguments as of `begin`.

        Yields:
            How many of the step's episodes were drawn since the last time; 0 now and then while none is. It ends when
            all that it waits for are, scored or not.

        Raises:
            NoGroupKept: the filter refuses group after group, or they fail.
            EnginehouseError: what else ended the feed; see `EpisodeRunner.play`.
        """
        if self._begun is None:
            self.begin(version, left)
        missing, self._begun = self._begun or 0, None
        while (told := self._next()) is not None:
            if isinstance(told, BaseException):
                raise told
            if isinstance(told, int):  # more may be drawn than the step takes
                missing, told = missing - told, min(told, missing)
                yield max(told, 0)

    def _next(self) -> int | list[ScoredGroup] | BaseException | None:
        try:
            return self._messages.get(timeout=QUIET_SECONDS)
        except queue.Empty:
            return 0

    def take(self) -> list[ScoredGroup]:
        """The step's groups, in the order of their tasks, once they are scored. Raises as `draw`."""
        while not isinstance(told := self._messages.get(), list):
            if isinstance(told, BaseException):
                raise told
        return told

    def state(self) -> dict[str, Any]:
        """Which tasks come next, and which were handed out and not trained on but by the step whose groups were taken
        last: plain data, from which `Tasks.restore` goes on."""
        return self._loop.call(lambda: self._tasks.state(self._schedule.open_groups))

    def metrics(self) -> dict[str, float]:
        """Groups that were not trained on since this was asked for last, by reason, and how many are under way; and how
        many episodes failed (`EpisodeRunner.metrics`)."""
        return self._loop.call(self._metrics)

    def close(self) -> None:
        """End what is under way."""
        self._loop.call(self._cancel)

    # On the event loop

    def _begin_step(self, version: int, left: int) -> int:
        """Returns how many episodes are still to be drawn."""
        self.version, self._wanted, self._left = version, self._schedule.groups, left
        missing = self._samples * (self._schedule.groups - len(self._ended))
        self._advance()
        return missing

    def _advance(self) -> None:
        """Begin what may be begun; hand over what the step waits for, if it is there."""
        if self._error is None:
            try:
                for task in self._tasks.next(self._schedule.count_room(self._wanted, self._left)):
                    self._begin(task)
            except Exception as error:
                self._fail(error)
        if not self._wanted:
            return
        if self._error is not None:
            self._messages.put(self._error)
            self._wanted = 0
            return
        chosen = self._schedule.choose(self.version)
        if chosen is not None or not self._drawing:
            self._messages.put(None)  # what is drawn need not be waited for
        if chosen is not None:
            self._left -= len(chosen)
            self._wanted = 0
            self._messages.put([self._take_group(serial) for serial in chosen])
            self._leave_over(self._schedule.find_overdue(self.version + 1))
            self._advance()

    def _take_group(self, serial: int) -> ScoredGroup:
        return replace(self._ended.pop(serial), left_over=self._left_over.pop(serial, 0))

    def _begin(self, task: Task) -> None:
        self._schedule.begin(task.serial, self.version)
        self._drawing.add(task.serial)
        self._playing[task.serial] = asyncio.get_running_loop().create_task(self._play_task(task))

    async def _play_task(self, task: Task) -> None:
        """Make a group, and see what becomes of it."""
        serial = task.serial
        try:
            played = await self._runner.play_group(task, lambda: self._note_drawn(serial))
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._forget(serial)
            self._fail(error)
        else:
            if self._playing.get(serial) is not asyncio.current_task():  # an environment that kept its cancellation
                return
            self._forget(serial)
            if played.kept:
                self._in_vain.clear()
                self._ended[serial] = played
                self._schedule.end(serial)
            else:
                self._refuse(played)
        self._advance()

    def _note_drawn(self, serial: int) -> None:
        """A group's episodes are drawn, and are being scored."""
        if serial in self._drawing:
            self._drawing.discard(serial)
            if self._wanted:
                self._messages.put(self._samples)
                if not self._drawing:
                    self._messages.put(None)

    def _forget(self, serial: int) -> None:
        self._note_drawn(serial)
        self._playing.pop(serial, None)

    def _refuse(self, played: ScoredGroup) -> None:
        self._counts["refused" if played.rewards else "dropped"] += 1
        self._schedule.give_up(played.task.serial)
        self._in_vain.append(played)
        if len(self._in_vain) >= MOST_REFUSED * self._schedule.groups:
            self._fail(_make_no_group_kept(self._in_vain, self._runner.last_error))

    def _leave_over(self, serials: Sequence[int]) -> None:
        """Give up groups that are too late for any step; their tasks come again, so that long ones are trained on."""
        self._tasks.repeat(serials)
        self._left_over.update(serials)
        self._counts["left_over"] += len(serials)
        for serial in serials:
            self._schedule.give_up(serial)
            self._ended.pop(serial, None)
            self._drawing.discard(serial)
            if (playing := self._playing.pop(serial, None)) is not None:
                playing.cancel()

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self._cancel()

    def _cancel(self) -> None:
        for playing in self._playing.values():
            playing.cancel()

    def _metrics(self) -> dict[str, float]:
        counts, self._counts = self._counts, Counter()
        under_way = float(len(self._schedule.open_groups))
        figures = {reason: float(counts[reason]) for reason in REASONS} | self._runner.metrics()
        return {"feed/under_way": under_way} | {f"feed/{name}": value for name, value in figures.items()}


class RunningTasks:
    """Tasks that are played, all at once, from now on. Yields what came of each, as they end.

    Args:
        loop: where.
        tasks: what.
        play: how.
    """

    def __init__(self, loop: EventLoop, tasks: Sequence[Task], play: Callable[[Task], Awaitable[ScoredGroup]]):
        self._messages: queue.SimpleQueue[ScoredGroup | BaseException | None] = queue.SimpleQueue()
        self._all = loop.submit(self._play(tasks, play))

    async def _play(self, tasks: Sequence[Task], play: Callable[[Task], Awaitable[ScoredGroup]]) -> None:
        async def one(task: Task) -> None:
            self._messages.put(await play(task))

        try:
            async with asyncio.TaskGroup() as group:
                for task in tasks:
                    group.create_task(one(task))
        except* Exception as errors:
            self._messages.put(errors.exceptions[0])
        else:
            self._messages.put(None)

    def __iter__(self) -> Iterator[ScoredGroup]:
        """Those that were not yielded yet; raises what ended the playing."""
        while (group := self._messages.get()) is not None and not isinstance(group, BaseException):
            yield group
        self._messages.put(group)  # for who asks again
        if group is not None:
            raise group

    @property
    def is_ended(self) -> bool:
        """Whether nothing is played any more."""
        return self._all.done()

    def wait(self, seconds: float) -> bool:
        """As `is_ended`, after so many seconds at most."""
        return bool(concurrent.futures.wait([self._all], seconds).done)

    def cancel(self) -> None:
        """End what is played; nothing more is to be asked for."""
        self._all.cancel()


def _make_no_group_kept(groups: Sequence[ScoredGroup], last: BaseException | None) -> NoGroupKept:
    """The error that none of some groups is trained on, given what failed last."""
    refused, said = [group for group in groups if group.rewards], []
    if refused:
        rewards = [group.rewards for group in refused]
        alike = sum(len(set(of_group)) == 1 for of_group in rewards)
        every = [reward for of_group in rewards for reward in of_group]
        said.append(
            f"rollout.keep refused {len(refused)} groups one after another. In {alike} of them all rewards are equal; "
            f"their rewards are {min(every):g} to {max(every):g}, {statistics.fmean(every):.3g} on average. Are the "
            "prompts too easy or too hard, or the temperature too low? More samples_per_prompt make differences "
            "likelier"
        )
    if dropped := len(groups) - len(refused):
        why = "the environment returned no episode" if last is None else f"at last: {describe_error(last)}"
        said.append(f"{dropped} groups one after another were dropped (rollout.on_failure), as they failed; {why}")
    error = NoGroupKept("; ".join(said))
    error.__cause__ = last if dropped else None
    return error
