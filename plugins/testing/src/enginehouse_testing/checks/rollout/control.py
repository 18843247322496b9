"""Checks that requests can be aborted, paused and resumed, that no token is lost, and that a pause holds requests."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from enginehouse.engines.rollout import Health, PauseMode
from enginehouse.plugin import capabilities
from enginehouse_testing.check import EXACT, Checks, Measured, RolloutCheck, wrong
from enginehouse_testing.checks.rollout.reference import (
    LOGPROB_TOLERANCE,
    logprob_error,
    prefixed,
    serves,
    switched_error,
)
from enginehouse_testing.comparison import larger
from enginehouse_testing.replica import ReplicaTrial, SampledCompletion, sampled, soon

PROMPT, OTHER, LATE = [5, 6, 7], [9, 8], [4, 4, 10, 12]
CACHED = [5 + index * index % 23 for index in range(300)]
"""A prompt that is long enough to fill blocks of any engine's prefix cache."""
LONG = 1600
"""Number of tokens of a request that will be interrupted."""
ATTEMPTS = 5
"""Maximum number of attempts to interrupt a request before it ends. On a busy machine, an attempt may come too late."""
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}

Paused = tuple[SampledCompletion, SampledCompletion, int]
"""A request from before a pause, a request that arrived during it, and the version of the update made during it."""

FIRST = Checks(RolloutCheck)
CHECKS = Checks(RolloutCheck, tolerance=LOGPROB_TOLERANCE)


@FIRST.act(since="1.1")
async def _overtaking(replica: ReplicaTrial) -> str:
    """A short request that came later is answered while a long request still runs, because requests are batched
    continuously."""
    for _ in range(ATTEMPTS):
        running = await replica.start_request(PROMPT, max_tokens=LONG, **GREEDY)
        overtaken = not running.done()
        await soon(replica.engine.abort())
        await running
        if overtaken:
            return ""
    return (
        f"a request for 2 tokens was answered only after an earlier request for {LONG}, in {ATTEMPTS} of {ATTEMPTS} "
        "attempts: begin requests while others run (continuous batching). An engine that answers batch by batch can "
        "neither abort nor pause requests"
    )


async def _abort_one_of_two(replica: ReplicaTrial) -> tuple[SampledCompletion, SampledCompletion]:
    for _ in range(ATTEMPTS):
        running = await replica.start_request(PROMPT, max_tokens=LONG, **GREEDY)
        aborted = f"certify-{replica.requests - 1}"
        beside = asyncio.create_task(replica.request(OTHER, max_tokens=60, **GREEDY))
        await asyncio.sleep(0)
        await soon(replica.engine.abort([aborted]))
        (first,) = sampled(PROMPT, await running)
        (second,) = sampled(OTHER, await beside)
        if first.reason == "abort":
            break
    return first, second


@CHECKS.judge(_abort_one_of_two)
def abort_one(completions: tuple[SampledCompletion, SampledCompletion]) -> Measured:
    """An aborted request returns the tokens it had, with their logprobs, and another running request continues."""
    aborted, beside = completions
    if mistake := _not_aborted(aborted):
        return wrong(mistake)
    if (len(beside.tokens), beside.reason) != (60, "length"):
        return wrong(f"the other request ended with {beside.reason!r} after {len(beside.tokens)} of 60 tokens")
    return serves("tied", [aborted, beside])


def _not_aborted(completion: SampledCompletion) -> str:
    """Return "" if a completion was aborted after some, but not all, of its tokens; else describe how it ended."""
    tokens = len(completion.tokens)
    if completion.reason != "abort":
        ended = f"ended with {completion.reason!r} after {tokens} of {LONG} tokens"
        early = ": it had ended before, see the check 'overtaking'" if tokens == LONG else ""
        return f"an aborted request {ended}{early}"
    return "" if 0 < tokens < LONG else f"an aborted request came back with {tokens} tokens"


async def _abort_everything(replica: ReplicaTrial) -> list[SampledCompletion]:
    for _ in range(ATTEMPTS):
        running = await replica.start_request(PROMPT, max_tokens=LONG, n=3, **{**GREEDY, "temperature": 1.0})
        await soon(replica.engine.abort())
        aborted = list(sampled(PROMPT, await running))
        if all(completion.reason == "abort" for completion in aborted):
            break
    return [*aborted, *await replica.draw(OTHER, max_tokens=4, **GREEDY)]


@CHECKS.judge(_abort_everything)
def abort_all(completions: list[SampledCompletion]) -> Measured:
    """If all requests are aborted, each returns the tokens it had, and the next request is served."""
    *aborted, after = completions
    mistakes = dict.fromkeys(mistake for completion in aborted if (mistake := _not_aborted(completion)))
    if mistakes:
        return wrong("; ".join(mistakes))
    if len(aborted) != 3:
        return wrong(f"{len(aborted)} completions of 3 came back")
    return larger(logprob_error("tied", aborted), serves("tied", [after]))


async def pause(
    replica: ReplicaTrial,
    mode: PauseMode,
    tokens: int,
    prompt: Sequence[int] = PROMPT,
    late_prompt: Sequence[int] = LATE,
    new: str = "tied, new",
) -> Paused:
    """Make a long request, pause, make a late request, and update to the model `new` while paused."""
    for _ in range(ATTEMPTS):
        await replica.at_rest()
        running = await replica.start_request(prompt, max_tokens=tokens, **GREEDY)
        await soon(replica.engine.pause(mode))
        if mode in ("abort", "wait"):
            await running
        waiting = asyncio.create_task(replica.request(late_prompt, max_tokens=8, **GREEDY))
        await replica.until(lambda health: health.paused, "paused")
        version = await replica.update(new, pause=None)
        (early,) = sampled(prompt, await running)
        (late,) = sampled(late_prompt, await waiting)
        if mode == "wait" or early.reason == "abort" or early.last == version:
            break
    return early, late, version


async def keep_cache(replica: ReplicaTrial, tokens: int = LONG, new: str = "tied, new") -> Paused:
    """Pause as `pause` does, after a request for the same prompt, whose keys and values stay in a prefix cache."""
    await replica.draw(CACHED, max_tokens=2, **GREEDY)
    return await pause(replica, "keep_cache", tokens, CACHED, [*CACHED, 9], new)


def _judge_paused(early: SampledCompletion, late: SampledCompletion, version: int) -> Measured:
    """Compare the request from before the pause with the old model, and the request during the pause with the new
    model."""
    if early.last >= version:
        return wrong(f"a request that ended before version {version} was served reports version {early.last}")
    return larger(
        prefixed("a request from before the pause", serves("tied", [early])),
        prefixed("a request that arrived while paused", serves("tied, new", [late], version)),
    )


@CHECKS.judge(partial(pause, mode="abort", tokens=LONG))
def pause_abort(paused: Paused) -> Measured:
    """A pause ends running requests with the tokens they had; requests that arrive while paused wait, even during an
    update."""
    mistake = _not_aborted(paused[0])
    return wrong(mistake) if mistake else _judge_paused(*paused)


@CHECKS.judge(partial(pause, mode="wait", tokens=100))
def pause_wait(paused: Paused) -> Measured:
    """A pause lets running requests finish; requests that arrive while paused wait, even during an update."""
    early = paused[0]
    if (len(early.tokens), early.reason) != (100, "length"):
        return wrong(f"a running request was cut short: {early.reason!r} after {len(early.tokens)} of 100 tokens")
    return _judge_paused(*paused)


@CHECKS.judge(partial(pause, mode="keep", tokens=LONG), capability=capabilities.PAUSE_KEEP)
def pause_keep(paused: Paused) -> Measured:
    """A request kept over an update continues with the new weights and reports both versions; requests that arrive
    while paused wait."""
    return judge_kept(*paused)


@CHECKS.judge(partial(pause, mode="keep", tokens=LONG), capability=capabilities.PAUSE_KEEP, since="1.1")
def kept_recomputed(paused: Paused) -> Measured:
    """A request kept over an update continues with keys and values that are computed again from the new weights."""
    return larger(judge_kept(*paused), switched_error("tied", "tied, new", paused[0], keeps_cache=False))


@CHECKS.judge(
    keep_cache,
    capability=capabilities.PAUSE_KEEP_CACHE,
    since="1.1",
)
def pause_keep_cache(paused: Paused) -> Measured:
    """A request kept with its cache over an update continues with the new weights and the old keys and values; requests
    that arrive while paused wait, and use no keys and values of the old weights."""
    return larger(judge_kept(*paused), switched_error("tied", "tied, new", paused[0], keeps_cache=True))


def judge_kept(
    early: SampledCompletion,
    late: SampledCompletion,
    version: int,
    old: str = "tied",
    new: str = "tied, new",
    whole: int = LONG,
) -> Measured:
    """Compare a request for `whole` tokens, from before the pause, with both models, and the request during the pause
    with the new model."""
    if (len(early.tokens), early.reason) != (whole, "length"):
        return wrong(f"a kept request ended with {early.reason!r} after {len(early.tokens)} of {whole} tokens")
    if (early.last, early.first < version) != (version, True):
        return wrong(f"a request kept over the update to {version} reports versions {early.first} to {early.last}")
    begun = replace(early, tokens=early.tokens[:1], logprobs=early.logprobs[:1], last=early.first)
    if serves(old, [early]).error <= LOGPROB_TOLERANCE:
        return wrong("a request kept over an update used the old weights until its end")
    return larger(
        prefixed("its first token", serves(old, [begun])),
        prefixed("a request that arrived while paused", serves(new, [late], version)),
    )


async def _keep_often(replica: ReplicaTrial) -> tuple[list[SampledCompletion], list[Health]]:
    running = await replica.start_request(CACHED, max_tokens=200, **GREEDY)
    healths = []
    for _ in range(3):
        await soon(replica.engine.pause("keep"))
        healths.append(await soon(replica.engine.health()))
        await soon(replica.engine.resume())
    return list(sampled(CACHED, await running)), healths


@CHECKS.judge(_keep_often, capability=capabilities.PAUSE_KEEP)
def kept_whole(result: tuple[list[SampledCompletion], list[Health]]) -> Measured:
    """A request that is kept and resumed several times has the same result as without a pause. Meanwhile, `health`
    counts its tokens and its prompt's, if the engine knows them."""
    completions, healths = result
    tokens, reason = completions[0].tokens, completions[0].reason
    counts = [health.running_tokens for health in healths if health.running and health.running_tokens is not None]
    most = len(CACHED) + len(tokens)
    if counts and not len(CACHED) <= max(counts) <= 2 * most:  # an engine may count whole blocks of its cache
        return wrong(f"health reports {counts} running tokens of a prompt and completion of {most} tokens")
    if (len(tokens), reason) != (200, "length"):
        return wrong(f"a kept request ended with {reason!r} after {len(tokens)} of 200 tokens")
    return serves("tied", completions)


@CHECKS.act(tolerance=EXACT)
async def _health(replica: ReplicaTrial) -> str:
    """Health reports running and waiting requests, and whether the engine is paused."""
    engine = replica.engine
    await replica.until(lambda health: health.running == health.waiting == 0, "at rest")
    for _ in range(ATTEMPTS):
        running = await replica.start_request(PROMPT, max_tokens=LONG, **GREEDY)
        busy = await soon(engine.health())
        ended = running.done()
        await soon(engine.abort())
        await running
        if not ended:
            break
    if not busy.running:
        early = "; it had ended before, see the check 'overtaking'" if ended else ""
        return f"health reports no running request while one runs: {busy}{early}"
    await replica.until(lambda health: health.running == health.waiting == 0, "at rest after an abort")
    await soon(engine.pause("wait"))
    late = asyncio.create_task(replica.request(LATE, max_tokens=2))
    paused = await replica.until(
        lambda health: health.paused and health.waiting + health.running > 0, "paused with a waiting request"
    )
    await soon(engine.resume())
    await late
    resumed = await soon(engine.health())
    return "" if not resumed.paused and resumed.version == paused.version else f"after the pause, health is {resumed}"
