"""Seeded requests are not drawn beside those that would change their tokens."""

import asyncio

import pytest

from enginehouse.engines.rollout import SamplingParams
from enginehouse_sglang.batch_gate import BatchGate, classify


@pytest.mark.parametrize(
    ("sampling", "seeded", "kind"),
    [
        ({}, False, None),
        ({}, True, "seeded by id"),
        ({"top_p": 0.9}, True, "ranked"),
        ({"top_k": 3}, False, "ranked"),
        ({"temperature": 0.0}, False, "ranked"),
        ({"max_tokens": 0}, True, None),
    ],
)
def test_what_a_request_is(sampling, seeded, kind):
    assert classify(SamplingParams(**sampling), seeded) == kind


async def settled():
    for _ in range(20):
        await asyncio.sleep(0)


async def test_kinds_take_turns_in_the_order_they_came_and_a_cancelled_one_holds_up_nobody():
    gate, begun, ends = BatchGate(), [], {}

    async def draw(name, kind):
        ends[name] = asyncio.Event()
        async with gate.enter(kind):
            begun.append(name)
            await ends[name].wait()

    tasks = {}
    for name, kind in (
        ("a", "ranked"), ("b", "ranked"), ("any", None), ("c", "seeded by id"), ("d", "ranked"), ("e", "ranked"),
    ):  # fmt: skip
        tasks[name] = asyncio.create_task(draw(name, kind))
    await settled()
    assert sorted(begun) == ["a", "any", "b"]  # d waits, for c came before
    tasks["b"].cancel()
    tasks["d"].cancel()
    ends["a"].set()
    await settled()
    assert begun[3:] == ["c"]
    ends["c"].set()
    await settled()
    assert begun[4:] == ["e"]
    ends["e"].set()
    ends["any"].set()
    await asyncio.gather(*tasks.values(), return_exceptions=True)
