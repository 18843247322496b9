"""A fleet in this process, over one replica of the torch engine, or over engines that do as they are told."""

import asyncio
import os
import signal
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from enginehouse.controller import RemoteError, WorkerGroup, WorkerSpec, register
from enginehouse.data import Batch, Ragged
from enginehouse.engines.model import ModelSpec
from enginehouse.engines.rollout import GenerateRequest, SamplingParams
from enginehouse.errors import EnginehouseError
from enginehouse.fleet.fleet import RolloutFleet
from enginehouse.fleet.generation import sort_samples
from enginehouse.fleet.replica import ReplicaStatus
from enginehouse.fleet.request_batches import RequestBatch
from enginehouse.roles.workers import RolloutWorker, TrainWorker
from enginehouse.weights.sync import WeightSync
from enginehouse_testing.models import tiny_model

PROMPTS = Batch(
    {"prompt_ids": Ragged.from_list([[3, 4, 5], [6, 7], [8], [9, 10, 11, 12]]), "prompt_index": torch.arange(4)}
)
SAMPLING = SamplingParams(n=3, max_tokens=5)
LONG = 13
"""A prompt that begins with this token is answered once it is let go, or aborted."""


class ToldWorker(RolloutWorker):
    @register
    async def launch(self):
        name = await super().launch()
        self.held, generate, abort = {}, self.engine.generate, self.engine.abort

        async def told(request):
            if request.prompt_ids[:1] == [LONG]:
                go = self.held[request.id] = asyncio.get_running_loop().create_future()
                reason = await go
                del self.held[request.id]
                result = await generate(request)
                return replace(result, completions=[replace(one, finish_reason=reason) for one in result.completions])
            return await generate(request)

        async def end(ids=None):
            self.let_go("abort", ids)
            await abort(ids)

        self.engine.generate, self.engine.abort = told, end
        return name

    def let_go(self, reason="stop", ids=None):
        for name in list(self.held) if ids is None else ids:
            if name in self.held and not self.held[name].done():
                self.held[name].set_result(reason)

    @register
    async def go(self):
        self.let_go()
        return len(self.held)


def long(name="long") -> GenerateRequest:
    return GenerateRequest(name, [LONG, 4], SAMPLING)


def short(name="short") -> GenerateRequest:
    return GenerateRequest(name, [3, 4], SAMPLING)


@pytest.fixture(scope="module")
def spec():
    return WorkerSpec(ToldWorker, "torch", ModelSpec(tiny_model()), {})


@pytest.fixture(scope="module")
def fleet(spec):
    opened = RolloutFleet(spec, 1, launcher="inline", samples_in_flight=4)
    assert opened.launch() == [opened.describe()[0]["engine"]]
    yield opened
    opened.shutdown()


@pytest.fixture(scope="module")
def group(spec):
    with WorkerGroup(None, spec, name="rollout", launcher="inline") as opened:
        opened.launch()
        yield opened


@pytest.fixture
def over(group):
    opened = RolloutFleet.from_group(group)
    yield opened
    opened.shutdown()


def draw(fleet: RolloutFleet, sampling: SamplingParams = SAMPLING, batch: Batch = PROMPTS) -> Batch:
    return sort_samples(fleet.generate_each(batch, sampling, seed=4))


def test_samples_have_the_rows_and_columns_of_a_worker_group(fleet, over, group):
    expected = group.generate(PROMPTS, SAMPLING, seed=4)
    for drawn in (draw(over), draw(fleet)):  # the other is given a prompt at a time
        assert set(drawn.columns) == set(expected.columns)
        for name in ("input_ids", "loss_mask"):
            assert torch.equal(drawn[name].values, expected[name].values)
            assert torch.equal(drawn[name].offsets, expected[name].offsets)
        assert drawn["seconds"].dtype == expected["seconds"].dtype
        assert drawn["seconds"].min() > 0
    assert torch.equal(draw(over)["rollout_logprobs"].values, expected["rollout_logprobs"].values)


def test_what_is_handed_over_as_it_ends_is_all_of_it(fleet, group):
    pieces = list(fleet.generate_each(PROMPTS, SAMPLING, seed=4))
    assert [list(rows) for rows, _ in pieces] == [[0], [1], [2], [3]]
    assert all(len(samples) == SAMPLING.n for _, samples in pieces)
    expected = group.generate(PROMPTS, SAMPLING, seed=4)
    for came in (pieces, pieces[::-1]):
        assert torch.equal(sort_samples(came)["input_ids"].values, expected["input_ids"].values)
        assert torch.equal(sort_samples(came)["input_ids"].offsets, expected["input_ids"].offsets)


def test_responses_stand_in_the_order_of_their_prompts_whichever_end_first(fleet, monkeypatch):
    prompts = [row.tolist() for row in PROMPTS["prompt_ids"]]
    drawn = fleet.draw(prompts, SAMPLING, seed=4)
    assert drawn.select(["input_ids", "rollout_logprobs"]).equal(draw(fleet).select(["input_ids", "rollout_logprobs"]))
    pieces = [([row], drawn.take(range(3 * row, 3 * row + 3))) for row in (2, 0, 3, 1)]
    monkeypatch.setattr(fleet, "generate_each", lambda *how: iter(pieces))
    assert fleet.draw(prompts, SAMPLING, seed=4).equal(drawn)


def test_no_prompts_give_no_samples(fleet):
    assert list(fleet.generate_each(PROMPTS.slice(0, 0), SAMPLING, seed=4)) == []


async def test_requests_of_one_turn_go_as_one_call(group, over, monkeypatch):
    calls = []
    call = group.execute_rank_async

    def counted(rank, method, requests, aborted):
        calls.append(len(requests.ids))
        return call(rank, method, requests, aborted)

    monkeypatch.setattr(group, "execute_rank_async", counted)
    requests = [GenerateRequest("mine", [3, row], SAMPLING) for row in range(3, 8)]
    results = await asyncio.gather(*map(over.generate, requests))
    assert calls[0] == 5
    assert not any(calls[1:])
    assert {result.id for result in results} == {"mine"}
    for result in results:
        assert [type(one.token_ids) for one in result.completions] == [np.ndarray] * SAMPLING.n


async def test_a_long_request_does_not_hold_up_a_short_one(group, over):
    first, second = asyncio.create_task(over.generate(long())), asyncio.create_task(over.generate(short()))
    drawn = [await second, await over.generate(short("later"))]
    assert not first.done()
    group.go()
    assert [result.id for result in [await first, *drawn]] == ["long", "short", "later"]


async def test_who_is_cancelled_ends_the_request_at_the_replica(group, over):
    first = asyncio.create_task(over.generate(long()))
    await over.generate(short())
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    while not over._router.idle:  # which it is once the replica has said that it ended
        await asyncio.sleep(0)
    assert group.go() == [0]
    assert (await over.generate(short("after"))).id == "after"


async def test_a_request_that_is_aborted_at_the_worker_ends_with_what_it_had(group, over):
    first = asyncio.create_task(over.generate(long()))
    await over.generate(short())
    group.abort()
    assert {one.finish_reason for one in (await first).completions} == {"abort"}


def test_no_two_fleets_over_a_group_call_requests_the_same(group, over, monkeypatch):
    names = []
    call = group.execute_rank_async

    def noted(rank, method, requests, aborted):
        names.extend(requests.ids)
        return call(rank, method, requests, aborted)

    monkeypatch.setattr(group, "execute_rank_async", noted)
    asyncio.run(over.generate(short()))
    other = RolloutFleet.from_group(group)
    asyncio.run(other.generate(short()))
    other.shutdown()
    assert len(names) == len(set(names)) == 2


def test_a_request_that_is_under_way_is_not_drawn_a_second_time(group):
    twice = RequestBatch.pack([long(), long()], ["same", "same"])
    with pytest.raises(RemoteError, match="a request with the id 'same' is in progress already"):
        group.execute_rank_async(0, "draw", twice, ()).result()
    while group.go() == [0]:  # it is not held yet
        pass
    assert group.execute_rank_async(0, "draw", RequestBatch.pack([], []), ()).result().ids == ("same",)


def test_who_asked_before_and_aborts_meanwhile_gets_nothing_of_what_ends_since(group):
    """A fleet that is gone has left a call behind."""

    def call(name, *aborted):
        asked = [short(name)] if name else []
        return group.execute_rank_async(0, "draw", RequestBatch.pack(asked, [one.id for one in asked]), aborted)

    left_behind = [call("", "unknown"), call("", "unknown")]
    assert call("new").result().ids == ("new",)
    for one in left_behind:
        answer = one.result()
        assert not answer.ids
        assert not answer.failures


def test_who_stops_iterating_ends_what_is_under_way(group, over):
    batch = Batch({"prompt_ids": Ragged.from_list([[3, 4], [LONG, 4]]), "prompt_index": torch.arange(2)})
    pieces = over.generate_each(batch, SAMPLING, seed=4)
    rows, _ = next(pieces)
    assert rows == [0]
    pieces.close()
    assert len(draw(over)) == 3 * len(PROMPTS)
    while group.go() != [0]:
        pass


def test_who_is_interrupted_while_it_waits_gets_out(group, over):
    batch = Batch({"prompt_ids": Ragged.from_list([[LONG, 4]]), "prompt_index": torch.arange(1)})
    threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        draw(over, batch=batch)
    while group.go() != [0]:
        pass


async def test_a_request_that_is_refused_costs_the_others_nothing_and_names_the_worker(over):
    requests = [GenerateRequest("good", [3, 4], SAMPLING), GenerateRequest("bad", [], SAMPLING)]
    good, bad = await asyncio.gather(*map(over.generate, requests), return_exceptions=True)
    assert len(good.completions) == SAMPLING.n
    assert isinstance(bad, RemoteError)
    assert str(bad).startswith("rollout rank 0 ")
    assert "empty prompt" in str(bad)
    assert isinstance(bad.cause, EnginehouseError)


def test_requests_and_answers_travel_as_arrays():
    requests = [
        GenerateRequest(str(row), [row] * row, SamplingParams(n=2, seed=row % 2 or None)) for row in range(1, 5)
    ]
    packed = RequestBatch.pack(requests, [request.id for request in requests])
    assert packed.tokens.tolist() == [1, 2, 2, 3, 3, 3, 4, 4, 4, 4]
    assert len(packed.sampling) == 1
    assert list(packed.unpack()) == requests


def test_figures_are_told_once(fleet):
    fleet.metrics()
    draw(fleet)
    figures = fleet.metrics()
    assert figures["rollout/replicas"] == 1
    assert figures["rollout/queued"] == 9  # a prompt of three samples at a time
    assert figures["rollout/busy_seconds"] > 0
    assert 0 < figures["rollout/utilisation"] <= 1
    figures = fleet.metrics()
    assert figures["rollout/queued"] == figures["rollout/busy_seconds"] == 0


def test_how_replicas_are_is_seen_from_any_thread_without_asking_them(fleet):
    assert fleet.describe_replicas() == [ReplicaStatus(0, "up", fleet._version, 0)]
    draw(fleet)
    seen = []
    thread = threading.Thread(target=lambda: seen.extend(fleet.describe_replicas()))
    thread.start()
    thread.join()
    assert [one.requests for one in seen] == [0]
    fleet._replicas[0].state = "returned"
    try:
        assert fleet.describe_replicas()[0].state == "without weights"
    finally:
        fleet._replicas[0].state = "serving"


def test_weights_reach_it_and_an_error_of_its_worker_names_it(fleet):
    train = WorkerSpec(TrainWorker, "torch", ModelSpec(tiny_model()), {"lr": 0.05})
    with WorkerGroup(None, train, name="actor", launcher="inline") as actor:
        sync = WeightSync(actor, fleet, "inproc", bucket_bytes=4096, timeout=30.0, probe=[[3, 4, 5]])
        sync.connect()
        assert sync.publish(1).effect < 1e-4
        assert set(draw(fleet)["weight_version"].tolist()) == {1}
        sync.close()
    with pytest.raises(KeyError, match="prompt_ids"):
        draw(fleet, batch=PROMPTS.drop(["prompt_ids"]))
    with pytest.raises(EnginehouseError, match="prompt_index"):
        draw(fleet, batch=PROMPTS.drop(["prompt_index"]))
    with pytest.raises(RemoteError, match=r"^rollout-0 rank 0 .*'generate' raised .*max_tokens -1"):
        draw(fleet, SamplingParams(max_tokens=-1))
    assert fleet.states == ["serving"]
