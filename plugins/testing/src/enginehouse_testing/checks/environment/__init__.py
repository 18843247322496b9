"""All checks of environments, in the order they are run and reported."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from enginehouse.engines.environment import Episode
from enginehouse.engines.rollout import Completion
from enginehouse_testing.check import EXACT, PROTOCOL, Check, Measured, found, wrong
from enginehouse_testing.environment_trial import SAMPLES, Drawn, EnvironmentTrial, number_of

BLOCKED_SECONDS = 0.25
"""Longest time an environment may keep the event loop, on the best of `TRIES` plays."""
TRIES = 3
CANCEL_SECONDS = 5.0
"""Longest time an environment may take to end once it is cancelled."""


def _episodes(trial: EnvironmentTrial) -> Measured:
    for task in trial.tasks():
        episodes = asyncio.run(trial.play(trial.environment(), task, []))
        if len(episodes) != SAMPLES:
            return wrong(f"task {task.serial}: {len(episodes)} episodes, and {SAMPLES} were asked for")
        for number, one in enumerate(episodes):
            if said := _malformed(one):
                return wrong(f"task {task.serial}, episode {number}: {said}")
    return Measured(0.0)


def _tokens(trial: EnvironmentTrial) -> Measured:
    for task in trial.tasks():
        drawn: list[Drawn] = []
        for number, one in enumerate(asyncio.run(trial.play(trial.environment(), task, drawn))):
            if said := _not_drawn(one, drawn):
                return wrong(f"task {task.serial}, episode {number}: {said}")
    return Measured(0.0)


def _order(trial: EnvironmentTrial) -> Measured:
    for task in trial.tasks():
        ways = [asyncio.run(trial.play(trial.environment(), task, [], partial(_delay, seed))) for seed in range(3)]
        for other in ways[1:]:
            if [list(one.tokens) for one in other] != [list(one.tokens) for one in ways[0]]:
                return wrong(f"task {task.serial}: episodes depend on which request ends first")
    return Measured(0.0)


def _at_once(trial: EnvironmentTrial) -> Measured:
    async def play() -> str:
        environment = trial.environment()
        alone = [await trial.play(environment, task, []) for task in trial.tasks()]
        together = await asyncio.gather(
            *(trial.play(environment, task, [], partial(_delay, 1)) for task in trial.tasks())
        )
        for task, one, other in zip(trial.tasks(), alone, together, strict=True):
            if [list(episode.tokens) for episode in one] != [list(episode.tokens) for episode in other]:
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
        await trial.play(trial.environment(), trial.tasks()[0], [])
        ended = True
        await ticking
        return max(gaps)

    seconds = min(asyncio.run(longest()) for _ in range(TRIES))
    return Measured(seconds, f"it kept the event loop for {seconds:.2g} s; await what takes time")


def _cancelled(trial: EnvironmentTrial) -> Measured:
    async def cancel() -> bool:
        playing = asyncio.create_task(trial.play(trial.environment(), trial.tasks()[0], [], lambda name: 3600.0))
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
        asyncio.run(trial.play(trial.environment(), trial.tasks()[0], [], error=error))
    except Exception:
        return Measured(0.0)
    return wrong("what the policy raised did not leave it: the run would never know")


def _malformed(one: Episode) -> str:
    lengths = {name: len(getattr(one, name)) for name in ("tokens", "mask", "logprobs", "versions")}
    if len(set(lengths.values())) != 1:
        return (
            f"its columns have different lengths: {', '.join(f'{name} {length}' for name, length in lengths.items())}"
        )
    if not any(one.mask):
        return "no token of it was chosen by the policy"
    if one.mask[0]:
        return "its first token counts as chosen, and nothing stands before it that the policy could continue"
    if not math.isfinite(one.score.reward):
        return f"its reward is {one.score.reward}"
    return ""


def _not_drawn(one: Episode, drawn: Sequence[Drawn]) -> str:
    """What is wrong with the chosen tokens of an episode, each of which is drawn after those before it; or nothing."""
    tokens, place = [int(token) for token in one.tokens], 0
    while place < len(tokens):
        if not one.mask[place]:
            place += 1
            continue
        here = [each.completion for each in drawn if each.after == tuple(tokens[:place])]
        if not here:
            return f"token {place} counts as chosen, and the policy was never asked to continue just what is before it"
        fitting = [each for each in here if _stands(each, one, tokens, place)]
        if not fitting:
            return f"the tokens from {place} on are not those that the policy drew there, all of them"
        if not any(_is_said(each, one, place) for each in fitting):
            return f"the tokens from {place} on have not the logprobs and versions that they were drawn with"
        place += max(len(each.token_ids) for each in fitting)
    return ""


def _stands(completion: Completion, one: Episode, tokens: Sequence[int], place: int) -> bool:
    end = place + len(completion.token_ids)
    return tokens[place:end] == list(completion.token_ids) and all(one.mask[place:end])


def _is_said(completion: Completion, one: Episode, place: int) -> bool:
    end = place + len(completion.token_ids)
    return [float(value) for value in one.logprobs[place:end]] == list(completion.logprobs) and all(
        completion.first_version <= version <= completion.last_version for version in one.versions[place:end]
    )


def _delay(seed: int, name: str) -> float:
    return number_of(f"{seed} {name}") % 5 / 500


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
