"""Requests ended, paused and gone on with: nothing that was drawn is lost, and what waits, waits."""

from __future__ import annotations

import asyncio
from typing import Any

from enginehouse.engines.rollout import PauseMode
from enginehouse.plugin import capabilities
from enginehouse_testing.check import PROTOCOL, Measured, RolloutCheck, wrong
from enginehouse_testing.checks.rollout.reference import LOGPROB_TOLERANCE, logprob_error, named, of_one, serves
from enginehouse_testing.comparison import larger
from enginehouse_testing.replica import Drawn, Replica, drawn, soon

PROMPT, OTHER, LATE = [5, 6, 7], [9, 8], [4, 4, 10, 12]
LONG = 1600
"""Tokens of a request that is to be interrupted."""
ATTEMPTS = 5
"""How often it may have ended before it was: on a busy machine this process may not get its turn."""
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


async def _overtaking(replica: Replica) -> str:
    for _ in range(ATTEMPTS):
        running = await replica.under_way(PROMPT, max_tokens=LONG, **GREEDY)
        overtaken = not running.done()
        await soon(replica.engine.abort())
        await running
        if overtaken:
            return ""
    return (
        f"a request for 2 tokens that came after one for {LONG} was answered after it, {ATTEMPTS} times of {ATTEMPTS}: "
        "take requests up while others run (continuous batching); an engine that answers batch by batch can neither "
        "be aborted nor paused"
    )


async def _abort_one(replica: Replica) -> tuple[list[Drawn], list[Drawn]]:
    for _ in range(ATTEMPTS):
        one = await replica.under_way(PROMPT, max_tokens=LONG, **GREEDY)
        ended = f"certify-{replica.requests - 1}"
        beside = asyncio.create_task(replica.request(OTHER, max_tokens=60, **GREEDY))
        await asyncio.sleep(0)
        await soon(replica.engine.abort([ended]))
        first = list(drawn(PROMPT, await one))
        second = list(drawn(OTHER, await beside))
        if first[0].reason == "abort":
            break
    return first, second


@of_one
def _judge_abort_one(found: tuple[list[Drawn], list[Drawn]]) -> Measured:
    (ended,), (beside,) = found
    if said := _not_cut(ended):
        return wrong(said)
    if (len(beside.tokens), beside.reason) != (60, "length"):
        return wrong(f"the request beside it ended with {len(beside.tokens)} of 60 tokens, {beside.reason!r}")
    return serves("tied", [ended, beside])


def _not_cut(one: Drawn) -> str:
    if one.reason != "abort":
        early = ": it had ended before, see the check 'overtaking'" if len(one.tokens) == LONG else ""
        return (
            f"a request under way was aborted, and ended with {one.reason!r} after {len(one.tokens)} of {LONG} tokens"
            + early
        )
    return "" if 0 < len(one.tokens) < LONG else f"an aborted request came back with {len(one.tokens)} tokens"


async def _abort_all(replica: Replica) -> list[Drawn]:
    for _ in range(ATTEMPTS):
        one = await replica.under_way(PROMPT, max_tokens=LONG, n=3, **{**GREEDY, "temperature": 1.0})
        await soon(replica.engine.abort())
        found = list(drawn(PROMPT, await one))
        if all(each.reason == "abort" for each in found):
            break
    return [*found, *await replica.draw(OTHER, max_tokens=4, **GREEDY)]


@of_one
def _judge_abort_all(found: list[Drawn]) -> Measured:
    *ended, after = found
    uncut = dict.fromkeys(said for one in ended if (said := _not_cut(one)))
    if uncut:
        return wrong("; ".join(uncut))
    if len(ended) != 3:
        return wrong(f"{len(ended)} completions of 3 came back")
    return larger(logprob_error("tied", ended), serves("tied", [after]))


async def _pause(replica: Replica, mode: PauseMode, tokens: int) -> tuple[Drawn, Drawn, int, bool]:
    """A long request, a pause, a late request and an update while paused; then the version of the update."""
    for _ in range(ATTEMPTS):
        await replica.at_rest()
        running = await replica.under_way(PROMPT, max_tokens=tokens, **GREEDY)
        await soon(replica.engine.pause(mode))
        over = None if mode == "keep" else await running
        late = asyncio.create_task(replica.request(LATE, max_tokens=8, **GREEDY))
        paused = (await replica.until(lambda health: health.paused, "paused")).paused
        version = await replica.update("tied, new", pause=None)
        (early,) = drawn(PROMPT, over if over is not None else await running)
        (after,) = drawn(LATE, await late)
        if mode == "wait" or early.reason == "abort" or early.last == version:
            break
    return early, after, version, paused


async def _pause_abort(replica: Replica) -> Any:
    return await _pause(replica, "abort", LONG)


async def _pause_wait(replica: Replica) -> Any:
    return await _pause(replica, "wait", 100)


async def _pause_keep(replica: Replica) -> Any:
    return await _pause(replica, "keep", LONG)


def _judge_paused(early: Drawn, late: Drawn, version: int) -> Measured:
    """What ran before the pause is the old model's, what arrived in it the new one's."""
    if early.last >= version:
        return wrong(f"what ended before version {version} was served says version {early.last}")
    return larger(
        named("a request that ran", serves("tied", [early])),
        named("a request that arrived while paused", serves("tied, new", [late], version)),
    )


@of_one
def _judge_pause_abort(found: tuple[Drawn, Drawn, int, bool]) -> Measured:
    early, late, version, _ = found
    if said := _not_cut(early):
        return wrong(said)
    return _judge_paused(early, late, version)


@of_one
def _judge_pause_wait(found: tuple[Drawn, Drawn, int, bool]) -> Measured:
    early, late, version, _ = found
    if (len(early.tokens), early.reason) != (100, "length"):
        return wrong(f"a request that was to end ended with {len(early.tokens)} of 100 tokens, {early.reason!r}")
    return _judge_paused(early, late, version)


@of_one
def _judge_pause_keep(found: tuple[Drawn, Drawn, int, bool]) -> Measured:
    """The switch is somewhere within; before it all is the old model's, right after it no longer."""
    early, late, version, _ = found
    if (len(early.tokens), early.reason) != (LONG, "length"):
        return wrong(f"a kept request ended with {len(early.tokens)} of {LONG} tokens, {early.reason!r}")
    if (early.last, early.first < version) != (version, True):
        return wrong(f"a request kept over the update to {version} says versions {early.first} to {early.last}")
    begun = Drawn(early.prompt, early.tokens[:1], early.logprobs[:1], early.reason, early.first, early.first)
    if serves("tied", [early]).error <= LOGPROB_TOLERANCE:
        return wrong("a request kept over an update went on with the old weights to its end")
    return larger(
        named("its first token", serves("tied", [begun])),
        named("a request that arrived while paused", serves("tied, new", [late], version)),
    )


async def _kept(replica: Replica) -> list[Drawn]:
    running = await replica.under_way(PROMPT, max_tokens=200, **GREEDY)
    for _ in range(3):
        await soon(replica.engine.pause("keep"))
        await soon(replica.engine.resume())
    return list(drawn(PROMPT, await running))


@of_one
def _judge_kept(found: list[Drawn]) -> Measured:
    if (len(found[0].tokens), found[0].reason) != (200, "length"):
        return wrong(f"a kept request ended with {len(found[0].tokens)} of 200 tokens, {found[0].reason!r}")
    return serves("tied", found)


async def _health(replica: Replica) -> str:
    engine = replica.engine
    await replica.until(lambda health: health.running == health.waiting == 0, "at rest")
    for _ in range(ATTEMPTS):
        running = await replica.under_way(PROMPT, max_tokens=LONG, **GREEDY)
        seen = await soon(engine.health())
        ended = running.done()
        await soon(engine.abort())
        await running
        if not ended:
            break
    if not seen.running:
        return f"while a request was under way: {seen}" + (
            "; it had ended before, see the check 'overtaking'" if ended else ""
        )
    await replica.until(lambda health: health.running == health.waiting == 0, "at rest after an abort")
    await soon(engine.pause("wait"))
    late = asyncio.create_task(replica.request(LATE, max_tokens=2))
    seen = await replica.until(
        lambda health: health.paused and health.waiting + health.running > 0, "paused, and one waits"
    )
    await soon(engine.resume())
    await late
    resumed = await soon(engine.health())
    return "" if not resumed.paused and resumed.version == seen.version else f"after a pause: {resumed}"


@of_one
def _judge_said(said: str) -> Measured:
    return wrong(said) if said else Measured(0.0)


OVERTAKING = RolloutCheck(
    name="overtaking",
    since="1.1",
    capability=PROTOCOL,
    claim="A short request that came later is answered while a long one still runs: requests are batched continuously",
    tolerance=0.0,
    acts=(_overtaking,),
    judge=_judge_said,
)
CHECKS = (
    RolloutCheck(
        name="abort_one",
        capability=PROTOCOL,
        claim="An aborted request returns the tokens it had, with their logprobs, and the one beside it goes on",
        tolerance=LOGPROB_TOLERANCE,
        acts=(_abort_one,),
        judge=_judge_abort_one,
    ),
    RolloutCheck(
        name="abort_all",
        capability=PROTOCOL,
        claim="All requests are aborted, each with the tokens it had, and the next is served",
        tolerance=LOGPROB_TOLERANCE,
        acts=(_abort_all,),
        judge=_judge_abort_all,
    ),
    RolloutCheck(
        name="pause_abort",
        capability=PROTOCOL,
        claim="A pause ends what runs with the tokens it had; what arrives while paused waits, over an update too",
        tolerance=LOGPROB_TOLERANCE,
        acts=(_pause_abort,),
        judge=_judge_pause_abort,
    ),
    RolloutCheck(
        name="pause_wait",
        capability=PROTOCOL,
        claim="A pause lets what runs end whole; what arrives while paused waits, over an update too",
        tolerance=LOGPROB_TOLERANCE,
        acts=(_pause_wait,),
        judge=_judge_pause_wait,
    ),
    RolloutCheck(
        name="pause_keep",
        capability=capabilities.PAUSE_KEEP,
        claim="What was kept over an update goes on with the new weights and says so; what arrives while paused waits",
        tolerance=LOGPROB_TOLERANCE,
        acts=(_pause_keep,),
        judge=_judge_pause_keep,
    ),
    RolloutCheck(
        name="kept_whole",
        capability=capabilities.PAUSE_KEEP,
        claim="A request kept and resumed several times is the one it would have been",
        tolerance=LOGPROB_TOLERANCE,
        acts=(_kept,),
        judge=_judge_kept,
    ),
    RolloutCheck(
        name="health",
        capability=PROTOCOL,
        claim="Health says whether something runs or waits and whether it is paused",
        tolerance=0.0,
        acts=(_health,),
        judge=_judge_said,
    ),
)
