"""A replica's end of an update, with an engine that keeps what it is given."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from enginehouse.engines.rollout import Health
from enginehouse.engines.weights import ParamMeta, TransferPlan, WeightChunk, WeightState, WeightSyncError
from enginehouse.weights.checksums import checksum
from enginehouse.weights.receiver import WeightReceiver


class Keeping:
    """An engine that keeps what it is given, and notes its calls."""

    def __init__(self):
        self.given = {}
        self.calls = []

    async def pause(self, mode):
        self.calls.append(f"pause {mode}")

    async def health(self):
        switches = any(call.startswith("pause") for call in self.calls) and "finish" not in self.calls
        return Health(2, 0, paused=switches, version=0, running_tokens=17 if switches else 3)

    async def start_weight_update(self, update):
        self.calls.append("start")

    async def update_weights(self, chunk):
        self.given |= chunk.checksums

    async def finish_weight_update(self, version):
        self.calls.append("finish")
        self.version = version

    async def abort_weight_update(self):
        self.calls.append("abort")
        self.given = {}

    async def weight_state(self):
        return WeightState(self.version, self.given)

    async def resume(self):
        self.calls.append("resume")


class Delivering:
    """A session that says of its chunks what is not so."""

    def __init__(self, *chunks):
        self.chunks = chunks

    def recv(self, version, deadline_seconds):
        yield from self.chunks

    def abort(self, version):
        pass


async def test_what_a_transport_has_summed_is_not_summed_again():
    tensors = {"a": torch.arange(5.0), "b": torch.zeros(3, 2)}
    metas = tuple(ParamMeta(name, "float32", tuple(tensor.shape)) for name, tensor in tensors.items())
    chunks = [WeightChunk([item], {"a": "of the transport"}) for item in tensors.items()]
    engine = Keeping()
    with ThreadPoolExecutor(1) as thread:
        receiver = WeightReceiver(engine, "here", thread)
        receiver.connect(TransferPlan("any", metas, ((0,), (1,)), 64, 1, "session"), Delivering(*chunks))
        sums = await receiver.receive(1, 30.0, "wait")
    assert sums.sent == sums.parameters == engine.given == {"a": "of the transport", "b": checksum(tensors["b"])}


async def test_a_parameter_that_came_in_parts_is_summed_as_they_left_and_as_a_whole():
    whole = torch.arange(12.0).view(4, 3)
    meta = ParamMeta("a", "float32", (4, 3))
    parts = {"a": [("a[0:4, 0:2]", whole[:, :2]), ("a[0:4, 2:3]", whole[:, 2:])]}
    chunk = WeightChunk([("a", whole)], parts=parts)
    engine = Keeping()
    with ThreadPoolExecutor(1) as thread:
        receiver = WeightReceiver(engine, "here", thread)
        receiver.connect(TransferPlan("any", (meta,), ((0,),), 64, 1, "session"), Delivering(chunk))
        sums = await receiver.receive(1, 30.0, "wait")
    assert sums.parameters == engine.given == {"a": checksum(whole)}
    assert sums.sent == {"a[0:4, 0:2]": checksum(whole[:, :2]), "a[0:4, 2:3]": checksum(whole[:, 2:])}


async def test_parts_that_a_transport_has_summed_are_not_summed_again():
    whole = torch.arange(12.0).view(4, 3)
    parts = {"a": [("a[0:4, 0:2]", whole[:, :2]), ("a[0:4, 2:3]", whole[:, 2:])]}
    known = {"a": "of the whole", "a[0:4, 0:2]": "of a part"}
    with ThreadPoolExecutor(1) as thread:
        receiver = WeightReceiver(Keeping(), "here", thread)
        plan = TransferPlan("any", (ParamMeta("a", "float32", (4, 3)),), ((0,),), 64, 1, "session")
        receiver.connect(plan, Delivering(WeightChunk([("a", whole)], known, parts=parts)))
        sums = await receiver.receive(1, 30.0, "wait")
    assert sums.parameters == {"a": "of the whole"}
    assert sums.sent == {"a[0:4, 0:2]": "of a part", "a[0:4, 2:3]": checksum(whole[:, 2:])}


async def test_an_abort_that_comes_late_leaves_a_newer_update_alone():
    tensors = {"a": torch.arange(5.0)}
    metas = (ParamMeta("a", "float32", (5,)),)
    engine = Keeping()
    with ThreadPoolExecutor(1) as thread:
        receiver = WeightReceiver(engine, "here", thread)
        session = Delivering(WeightChunk(list(tensors.items()), {}))
        receiver.connect(TransferPlan("any", metas, ((0,),), 64, 1, "session"), session)
        await receiver.receive(2, 30.0, "wait")
        await receiver.abort(1)
        committed = await receiver.commit(2)
    assert committed.state.version == engine.version == 2


class Update:
    """A receiver that is connected to an update of one parameter."""

    def __init__(self, engine, thread, stages_while_generating, lends=False):
        self.engine = engine
        self.receiver = WeightReceiver(engine, "here", thread, stages_while_generating)
        metas = (ParamMeta("a", "float32", (5,)),)
        plan = TransferPlan("any", metas, ((0,),), 64, 1, "session", lends=lends)
        self.receiver.connect(plan, Delivering(WeightChunk([("a", torch.arange(5.0))], {})))


@pytest.fixture
def update():
    with ThreadPoolExecutor(1) as thread:
        yield lambda stages, engine=None, **more: Update(engine or Keeping(), thread, stages, **more)


async def test_an_engine_that_stages_while_it_generates_is_paused_only_for_the_switch(update):
    given = update(True)
    assert (await given.receiver.receive(1, 30.0, "keep")).generating
    assert given.engine.calls == ["start"]
    assert given.receiver.serving.is_set()
    await given.receiver.commit(1)
    assert given.engine.calls == ["start", "pause keep", "finish", "resume"]
    assert not given.receiver.serving.is_set()
    given.receiver.serve(1)
    assert given.receiver.serving.is_set()


@pytest.mark.parametrize(("stages", "lends"), [(False, False), (True, True)])
async def test_other_engines_and_those_that_are_lent_weights_are_paused_before_the_first_byte(update, stages, lends):
    given = update(stages, lends=lends)
    assert not (await given.receiver.receive(1, 30.0, "keep")).generating
    assert not given.receiver.serving.is_set()
    await given.receiver.commit(1)
    assert given.engine.calls == ["pause keep", "start", "finish", "resume"]


@pytest.mark.parametrize("stages", [False, True])
@pytest.mark.parametrize(("pause", "tokens"), [("keep", 17), ("keep_cache", 17), ("wait", None), ("abort", None)])
async def test_tokens_of_interrupted_requests_are_counted_before_the_switch(update, stages, pause, tokens):
    given = update(stages)
    await given.receiver.receive(1, 30.0, pause)
    assert (await given.receiver.commit(1)).interrupted_tokens == tokens


async def test_an_abort_of_a_staged_update_touches_no_request(update):
    given = update(True)
    await given.receiver.receive(1, 30.0, "keep")
    await given.receiver.abort(1)
    assert given.engine.calls == ["start", "abort"]
    assert given.receiver.serving.is_set()


class NeverPausing(Keeping):
    async def pause(self, mode):
        await super().pause(mode)
        await asyncio.Event().wait()


async def test_an_engine_that_does_not_pause_for_the_switch_serves_the_old_version_again(update):
    given = update(True, NeverPausing())
    await given.receiver.receive(1, 0.1, "wait")
    with pytest.raises(WeightSyncError, match=r"here did not pause for weight update 1 within 0\.1 s"):
        await given.receiver.commit(1)
    await given.receiver.abort(1)
    assert given.engine.calls == ["start", "pause wait", "abort", "resume"]
    assert given.receiver.serving.is_set()


async def test_an_engine_that_runs_unverified_weights_is_paused_for_the_next_switch(update):
    """After a failed verification the engine generates, though no request is answered."""
    given = update(True)
    await given.receiver.receive(1, 30.0, "keep")
    await given.receiver.commit(1)
    await given.receiver.abort(1)  # the effect check failed
    given.engine.calls.clear()
    await given.receiver.receive(2, 30.0, "keep")
    await given.receiver.commit(2)
    assert given.engine.calls == ["start", "pause keep", "finish", "resume"]
    given.receiver.serve(2)
    assert given.receiver.serving.is_set()


class Slow(Keeping):
    """An engine that takes each chunk nearly until the deadline, by the clock of its loop."""

    async def update_weights(self, chunk):
        await super().update_weights(chunk)
        loop, seconds = asyncio.get_running_loop(), 27.0
        now = loop.time
        loop.time = lambda: now() + seconds


async def test_a_transfer_may_take_longer_than_its_deadline_while_chunks_arrive():
    tensors = {name: torch.arange(5.0) for name in "abcd"}
    metas = tuple(ParamMeta(name, "float32", (5,)) for name in tensors)
    buckets = tuple((index,) for index in range(len(metas)))
    with ThreadPoolExecutor(1) as thread:
        receiver = WeightReceiver(Slow(), "here", thread)
        session = Delivering(*(WeightChunk([item]) for item in tensors.items()))
        receiver.connect(TransferPlan("any", metas, buckets, 64, 1, "session"), session)
        sums = await receiver.receive(1, 30.0, "wait")
    assert sums.parameters.keys() == tensors.keys()


class Mute(Keeping):
    async def health(self):
        raise RuntimeError("no answer")


async def test_an_update_does_not_fail_because_interrupted_tokens_cannot_be_counted(update):
    muted = update(True, Mute())
    await muted.receiver.receive(1, 30.0, "keep")
    assert (await muted.receiver.commit(1)).interrupted_tokens is None
    assert muted.engine.version == 1
