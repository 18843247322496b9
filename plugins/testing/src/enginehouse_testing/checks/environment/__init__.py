"""All checks of environments, in the order they are run and reported."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from enginehouse.engines.environment import Episode, Task
from enginehouse_rl.episodes.checks import DrawnTokens, EpisodeChecks, MalformedEpisode
from enginehouse_testing.check import EXACT, PROTOCOL, Check, Measured, found, wrong
from enginehouse_testing.environment_trial import SAMPLES, EnvironmentTrial, number_of

BLOCKED_SECONDS = 0.25
"""Longest time an environment may keep the event loop, on the best of `TRIES` plays."""
TRIES = 3
TURNS_APART = 100
"""So many turns of the event loop lie between requests that are to end one after the other."""
CANCEL_SECONDS = 5.0
"""Longest time an environment may take to end once it is cancelled."""


def _episodes(trial: EnvironmentTrial) -> Measured:
    for task in trial.tasks():
        if said := _wrong_with(asyncio.run(trial.play(trial.environment(), task)), None, task):
            return wrong(said)
    return Measured(0.0)


def _tokens(trial: EnvironmentTrial) -> Measured:
    for task in trial.tasks():
        drawn = DrawnTokens()
        episodes = asyncio.run(trial.play(trial.environment(), task, drawn))
        if not _wrong_with(episodes, None, task) and (said := _wrong_with(episodes, drawn, task)):
            return wrong(said)
    return Measured(0.0)


def _wrong_with(episodes: Sequence[Episode], drawn: DrawnTokens | None, task: Task) -> str:
    """As a run would say it; empty where it would train on them."""
    try:
        EpisodeChecks("under test").check(episodes, SAMPLES, drawn, f"task {task.serial}")
    except MalformedEpisode as error:
        return str(error)
    return ""


def _order(trial: EnvironmentTrial) -> Measured:
    for task in trial.tasks():
        ways = [asyncio.run(trial.play(trial.environment(), task, None, partial(_delay, seed))) for seed in range(3)]
        for other in ways[1:]:
            if _rows(other) != _rows(ways[0]):
                return wrong(f"task {task.serial}: episodes depend on which request ends first")
    return Measured(0.0)


def _at_once(trial: EnvironmentTrial) -> Measured:
    async def play() -> str:
        environment = trial.environment()
        alone = [await trial.play(environment, task) for task in trial.tasks()]
        together = await asyncio.gather(
            *(trial.play(environment, task, None, partial(_delay, 1)) for task in trial.tasks())
        )
        for task, one, other in zip(trial.tasks(), alone, together, strict=True):
            if _rows(one) != _rows(other):
                return f"task {task.serial} is played otherwise beside others"
        return ""

    said = asyncio.run(play())
    return wrong(said) if said else Measured(0.0)


def _loop(trial: EnvironmentTrial) -> Measured:
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
    return Measured(seconds, f"it kept the event loop for {seconds:.2g} s; await what takes time")


def _cancelled(trial: EnvironmentTrial) -> Measured:
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

    ended = asyncio.run(cancel())
    return Measured(0.0) if ended else wrong("it goes on, or returns episodes, though it was cancelled")


def _errors(trial: EnvironmentTrial) -> Measured:
    error = RuntimeError("made up: the replica is gone")
    try:
        asyncio.run(trial.play(trial.environment(), trial.tasks()[0], error=error))
    except Exception:
        return Measured(0.0)
    return wrong("what the policy raised did not leave it: the run would never know")


def _rows(episodes: Sequence[Episode]) -> list[list[list[int]]]:
    """The tokens of each row of each episode."""
    return [[list(row.tokens) for row in episode.rows] for episode in episodes]


def _delay(seed: int, name: str) -> float:
    return 1 + number_of(f"{seed} {name}") % 7 * TURNS_APART


CHECKS: tuple[Check, ...] = tuple(
    Check(name=name, capability=PROTOCOL, claim=claim, tolerance=tolerance, acts=(act,), judge=found)
    for name, act, tolerance, claim in (
        ("episodes", _episodes, EXACT, "It returns as many episodes as are asked for, whole ones"),
        ("tokens", _tokens, EXACT, "Each token that counts was drawn by the policy after just what stands before it"),
        ("order", _order, EXACT, "Episodes do not depend on which request ends first"),
        ("at_once", _at_once, EXACT, "Tasks that are played at once are played as each alone"),
        ("loop", _loop, BLOCKED_SECONDS, "It never keeps the event loop: others are played on it, too"),
        ("cancelled", _cancelled, EXACT, "It ends where it is cancelled, as at a deadline"),
        ("errors", _errors, EXACT, "What the policy raises leaves it"),
    )
)
