"""Abort, pause, health, failure, shutdown of the torch rollout engine; the decode thread is held at chosen tokens."""

import asyncio

import pytest
import torch
from torch_rollout_driver import Gate, generate, launched, plain_greedy, posted, random_prompts

from enginehouse.engines.model import ModelSpec, ProcessContext
from enginehouse.engines.rollout import GenerateRequest, SamplingParams
from enginehouse.errors import EnginehouseError
from enginehouse_testing.models import tiny_model
from enginehouse_torch.decode_loop import RolloutEngineFailed
from enginehouse_torch.options import TorchRolloutOptions
from enginehouse_torch.rollout import TorchRolloutEngine

PROMPT = [5, 6, 7]
LONG = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


async def test_abort_returns_what_there_was_and_leaves_the_others():
    path = tiny_model()
    async with launched(path) as engine:
        gate = Gate(engine, after=4)
        running = await posted(generate(engine, PROMPT, [9, 8], **LONG))
        await gate.reached()
        aborting = await posted(engine.abort(["0"]))
        gate.open()
        await aborting
        aborted, other = (result.completions[0] for result in await running)
    assert (aborted.token_ids, aborted.finish_reason) == (plain_greedy(path, PROMPT, 4), "abort")
    assert len(aborted.logprobs) == 4
    assert (other.token_ids, other.finish_reason) == (plain_greedy(path, [9, 8], 12), "length")


async def test_abort_of_all_ends_waiting_requests_too():
    async with launched(tiny_model(), max_running=2) as engine:
        gate = Gate(engine, after=2)
        running = await posted(generate(engine, PROMPT, PROMPT, n=2, **LONG))
        await gate.reached()
        health = await engine.health()
        aborting = await posted(engine.abort())
        gate.open()
        await aborting
        begun, waiting = await running
    assert (health.running, health.waiting) == (2, 1)
    assert [len(c.token_ids) for c in begun.completions] == [2, 2]
    assert [len(c.token_ids) for c in waiting.completions] == [0, 0]
    assert {c.finish_reason for c in (*begun.completions, *waiting.completions)} == {"abort"}


async def test_a_cancelled_generate_frees_its_place():
    async with launched(tiny_model(), max_running=1) as engine:
        gate = Gate(engine, after=2)
        first = await posted(generate(engine, PROMPT, **LONG))
        await gate.reached()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        gate.open()
        (result,) = await generate(engine, PROMPT, **LONG)
        health = await engine.health()
    assert len(result.completions[0].token_ids) == 12
    assert (health.running, health.waiting) == (0, 0)


async def paused_at(engine, mode: str, after: int, *, release: bool = True):
    """Begin two requests, pause once each has `after` tokens; returns their task and the pause's."""
    gate = Gate(engine, after)
    running = await posted(generate(engine, PROMPT, [9, 8], **LONG))
    await gate.reached()
    pausing = await posted(engine.pause(mode))
    if release:
        gate.open()
        await pausing
    return running, pausing, gate


async def test_pause_abort_ends_running_requests_with_what_they_have():
    async with launched(tiny_model()) as engine:
        running, _, _ = await paused_at(engine, "abort", 3)
        results, health = await running, await engine.health()
    assert [len(r.completions[0].token_ids) for r in results] == [3, 3]
    assert {r.completions[0].finish_reason for r in results} == {"abort"}
    assert (health.paused, health.running) == (True, 0)


async def test_pause_wait_returns_only_when_running_requests_are_done():
    path = tiny_model()
    async with launched(path) as engine:
        running, pausing, gate = await paused_at(engine, "wait", 3, release=False)
        assert not pausing.done()
        late = await posted(generate(engine, [4], **LONG))
        gate.open()
        await pausing
        health = await engine.health()
        results = await running
        assert not late.done()
        await engine.resume()
        (postponed,) = await late
    assert [r.completions[0].token_ids for r in results] == [plain_greedy(path, p, 12) for p in (PROMPT, [9, 8])]
    assert (health.paused, health.running, health.waiting) == (True, 0, 1)
    assert postponed.completions[0].token_ids == plain_greedy(path, [4], 12)


async def test_pause_keep_freezes_and_resume_goes_on():
    path = tiny_model()
    async with launched(path) as engine:
        running, _, _ = await paused_at(engine, "keep", 3)
        health = await engine.health()
        assert not running.done()
        await engine.resume()
        results = await running
    assert (health.paused, health.running) == (True, 2)
    assert [r.completions[0].token_ids for r in results] == [plain_greedy(path, p, 12) for p in (PROMPT, [9, 8])]


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
async def test_requests_that_arrive_while_paused_wait_for_resume(mode):
    async with launched(tiny_model()) as engine:
        await engine.pause(mode)
        task = await posted(generate(engine, PROMPT, **LONG))
        await engine.weight_state()  # a round through the decode thread
        assert not task.done()
        assert (await engine.health()).waiting == 1
        await engine.resume()
        (result,) = await task
    assert len(result.completions[0].token_ids) == 12


async def test_a_kept_request_can_be_aborted_while_paused():
    async with launched(tiny_model()) as engine:
        running, _, _ = await paused_at(engine, "keep", 5)
        await engine.abort(["1"])
        await engine.resume()
        kept, aborted = await running
    assert (len(kept.completions[0].token_ids), len(aborted.completions[0].token_ids)) == (12, 5)


async def test_an_exception_while_decoding_fails_what_runs_and_is_reported_by_health():
    async with launched(tiny_model(), max_running=2) as engine:
        gate = Gate(engine, after=2)
        running = await posted(generate(engine, PROMPT, PROMPT, n=2, **LONG))
        await gate.reached()
        batch = engine.loop._batch  # fault injection: the forward pass fails from here on

        def broken(*args, **kwargs):
            raise RuntimeError("out of memory")

        batch._forward = broken
        gate.open()
        with pytest.raises(RolloutEngineFailed, match=r"rollout rank 0/1.*out of memory"):
            await running
        for call in (
            engine.health(),
            generate(engine, PROMPT),
            engine.pause(),
            engine.weight_state(),
            engine.abort(),
        ):
            with pytest.raises(RolloutEngineFailed, match="out of memory"):
                await call


async def test_logits_that_are_not_finite_end_the_engine_with_the_weight_version():
    async with launched(tiny_model()) as engine:
        batch = engine.loop._batch
        right = batch._forward
        batch._forward = lambda *args, **kwargs: right(*args, **kwargs) * torch.nan  # fault injection
        with pytest.raises(RolloutEngineFailed, match=r"not finite \(weight version 0\)"):
            await generate(engine, PROMPT)


async def test_shutdown_ends_what_runs_and_the_thread():
    async with launched(tiny_model()) as engine:
        gate = Gate(engine, after=3)
        running = await posted(generate(engine, PROMPT, **LONG))
        await gate.reached()
        thread = engine.loop._thread
        closing = await posted(engine.shutdown())
        gate.open()
        await closing
        (result,) = await running
        assert not thread.is_alive()
        with pytest.raises(RolloutEngineFailed, match="not launched"):
            await generate(engine, PROMPT)
    assert result.completions[0].finish_reason == "abort"


async def test_calls_that_reach_a_loop_that_has_ended_are_answered():
    async with launched(tiny_model()) as engine:
        loop = engine.loop
        await asyncio.to_thread(loop.stop, 30.0)
        for call in (generate(engine, PROMPT), engine.health(), engine.pause(), engine.resume()):
            with pytest.raises(RolloutEngineFailed, match="shut down"):
                await call


def test_an_engine_outlives_the_event_loop_of_a_caller():
    engine = TorchRolloutEngine()

    async def start():
        await engine.launch(ModelSpec(tiny_model()), TorchRolloutOptions(), ProcessContext("rollout"))
        await posted(generate(engine, *random_prompts(3), **LONG))  # never awaited: this event loop closes first

    async def go_on():
        (result,) = await generate(engine, PROMPT, **LONG)
        await engine.shutdown()
        return result

    asyncio.run(start())
    assert len(asyncio.run(go_on()).completions[0].token_ids) == 12


async def test_an_engine_that_is_asked_for_too_much_sleeps_not_at_all():
    async with launched(tiny_model()) as engine:
        drawn = await posted(generate(engine, PROMPT, **LONG))
        with pytest.raises(EnginehouseError, match="cannot sleep while 1 requests are in progress"):
            await engine.sleep()
        await drawn
        with pytest.raises(EnginehouseError, match="unknown tag 'graphs': each tag of sleep"):
            await engine.sleep(("graphs",))
        (result,) = await generate(engine, PROMPT, max_tokens=1)
    assert len(result.completions) == 1


async def test_a_request_that_was_not_begun_when_the_engine_fell_asleep_is_refused(monkeypatch):
    async with launched(tiny_model()) as engine:
        loaded, load = asyncio.Event(), engine._tokenizer

        async def slowly():
            await loaded.wait()
            return await load()

        monkeypatch.setattr(engine, "_tokenizer", slowly)
        drawn = await posted(generate(engine, PROMPT, stop=("x",), **LONG))
        await engine.sleep()
        loaded.set()
        with pytest.raises(EnginehouseError, match="cannot generate while its weights and kv_cache sleep"):
            await drawn


async def test_requests_with_one_id_are_aborted_together():
    async with launched(tiny_model()) as engine:
        gate = Gate(engine, after=1)

        async def twice(request):
            return await asyncio.gather(engine.generate(request), engine.generate(request))

        running = await posted(twice(GenerateRequest("twin", PROMPT, SamplingParams(**LONG))))
        await gate.reached()
        aborting = await posted(engine.abort(["twin"]))
        gate.open()
        await aborting
        results = await running
    assert {r.completions[0].finish_reason for r in results} == {"abort"}
