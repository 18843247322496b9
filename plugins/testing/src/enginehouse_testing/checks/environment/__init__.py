"""The checks of environments."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from enginehouse.engines.environment import Episode, Task
from enginehouse_rl.episodes.checks import EpisodeChecks, MalformedEpisode
from enginehouse_rl.episodes.drawn_tokens import DrawnTokens
from enginehouse_testing.check import Checks, Measured
from enginehouse_testing.environment_trial import SAMPLES, EnvironmentTrial, number_of

BLOCKED_SECONDS = 0.25
"""Longest time in seconds for which an environment may block the event loop, in the best of `TRIES` plays."""
TRIES = 3
TURNS_APART = 100
"""Number of turns of the event loop between the ends of two requests."""
CANCEL_SECONDS = 5.0
"""Longest time in which an environment may end after it is cancelled."""

CHECKS = Checks()


@CHECKS.act()
def _episodes(trial: EnvironmentTrial) -> str:
    """It returns as many episodes as are requested, all of them complete."""
    for task in trial.tasks():
        if mistake := _mistake_in(asyncio.run(trial.play(trial.environment(), task)), None, task):
            return mistake
    return ""


@CHECKS.act()
def _tokens(trial: EnvironmentTrial) -> str:
    """The policy sampled each token that counts, after exactly the tokens that precede it in the row."""
    for task in trial.tasks():
        drawn = DrawnTokens()
        episodes = asyncio.run(trial.play(trial.environment(), task, drawn))
        if not _mistake_in(episodes, None, task) and (mistake := _mistake_in(episodes, drawn, task)):
            return mistake
    return ""


def _mistake_in(episodes: Sequence[Episode], drawn: DrawnTokens | None, task: Task) -> str:
    """Return the reason why a run would reject the episodes; empty if the run would train on them."""
    try:
        EpisodeChecks("under test").check(episodes, SAMPLES, drawn, f"task {task.serial}")
    except MalformedEpisode as error:
        return str(error)
    return ""


@CHECKS.act()
def _order(trial: EnvironmentTrial) -> str:
    """Episodes do not depend on which request ends first."""
    for task in trial.tasks():
        first, *repeats = (
            _rows(asyncio.run(trial.play(trial.environment(), task, None, partial(_delay, seed)))) for seed in range(3)
        )
        if any(rows != first for rows in repeats):
            return f"task {task.serial}: episodes depend on which request ends first"
    return ""


@CHECKS.act()
def _at_once(trial: EnvironmentTrial) -> str:
    """Tasks that are played at the same time give the same episodes as tasks that are played alone."""

    async def play() -> str:
        environment = trial.environment()
        tasks = trial.tasks()
        alone = [await trial.play(environment, task) for task in tasks]
        together = await asyncio.gather(*(trial.play(environment, task, None, partial(_delay, 1)) for task in tasks))
        for task, episodes, concurrent in zip(tasks, alone, together, strict=True):
            if _rows(episodes) != _rows(concurrent):
                return f"task {task.serial} gives other episodes if other tasks are played at the same time"
        return ""

    return asyncio.run(play())


@CHECKS.act(tolerance=BLOCKED_SECONDS)
def _loop(trial: EnvironmentTrial) -> Measured:
    """It never blocks the event loop, on which other tasks are played too."""

    async def longest() -> float:
        loop, ended, gaps = asyncio.get_running_loop(), False, [0.0]

        async def tick() -> None:
            while not ended:
                before = loop.time()
                await asyncio.sleep(0)
                gaps.append(loop.time() - before)

        ticking = asyncio.create_task(tick())
        await asyncio.sleep(0)
        await trial.play(trial.environment(), trial.tasks()[0])
        ended = True
        await ticking
        return max(gaps)

    seconds = min(asyncio.run(longest()) for _ in range(TRIES))
    return Measured(seconds, f"it blocked the event loop for {seconds:.2g} s: await slow operations")


@CHECKS.act()
def _cancelled(trial: EnvironmentTrial) -> str:
    """It ends when it is cancelled, for example at a deadline."""

    async def cancel() -> bool:
        playing = asyncio.create_task(trial.play(trial.environment(), trial.tasks()[0], None, lambda name: math.inf))
        await asyncio.sleep(0.05)
        playing.cancel()
        await asyncio.wait([playing], timeout=CANCEL_SECONDS)
        ended = playing.done()
        with suppress(asyncio.CancelledError, Exception):
            if ended and not playing.cancelled():
                playing.result()
                return False
        return ended

    return "" if asyncio.run(cancel()) else "it continued, or returned episodes, after it was cancelled"


@CHECKS.act()
def _errors(trial: EnvironmentTrial) -> str:
    """It does not catch an error that the policy raises."""
    error = RuntimeError("made up: the replica is gone")
    try:
        asyncio.run(trial.play(trial.environment(), trial.tasks()[0], error=error))
    except Exception:
        return ""
    return "it caught an error of the policy, so the run would never learn of the error"


def _rows(episodes: Sequence[Episode]) -> list[list[list[int]]]:
    """Return the tokens of each row of each episode."""
    return [[list(row.tokens) for row in episode.rows] for episode in episodes]


def _delay(seed: int, name: str) -> float:
    return 1 + number_of(f"{seed} {name}") % 7 * TURNS_APART
