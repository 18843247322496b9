"""A replica's end of an update, with an engine that keeps what it is given."""

from concurrent.futures import ThreadPoolExecutor

import torch

from enginehouse.engines.weights import ParamMeta, TransferPlan, WeightChunk, WeightState
from enginehouse.weights.checksums import checksum
from enginehouse.weights.receiver import WeightReceiver


class Keeping:
    """An engine that keeps what it is given."""

    def __init__(self):
        self.given = {}

    async def pause(self, mode):
        pass

    async def start_weight_update(self, update):
        pass

    async def update_weights(self, chunk):
        self.given |= chunk.checksums

    async def finish_weight_update(self, version):
        self.version = version

    async def abort_weight_update(self):
        self.given = {}

    async def weight_state(self):
        return WeightState(self.version, self.given)

    async def resume(self):
        pass


class Delivering:
    """A session that says of its chunks what is not so."""

    def __init__(self, *chunks):
        self.chunks = chunks

    def recv(self, version, deadline_seconds):
        yield from self.chunks

    def abort(self, version):
        pass


async def test_an_engine_is_told_the_checksums_that_were_taken_here_and_not_those_of_a_transport():
    tensors = {"a": torch.arange(5.0), "b": torch.zeros(3, 2)}
    metas = tuple(ParamMeta(name, "float32", tuple(tensor.shape)) for name, tensor in tensors.items())
    chunks = [WeightChunk([item], {item[0]: "claimed"}) for item in tensors.items()]
    engine = Keeping()
    with ThreadPoolExecutor(1) as thread:
        receiver = WeightReceiver(engine, "here", thread)
        receiver.connect(TransferPlan("any", metas, ((0,), (1,)), 64, 1, "session"), Delivering(*chunks))
        sums = await receiver.receive(1, 30.0, "wait")
    assert sums.sent == sums.parameters == engine.given == {name: checksum(tensor) for name, tensor in tensors.items()}


async def test_a_parameter_that_came_in_parts_is_summed_as_they_left_and_as_a_whole():
    whole = torch.arange(12.0).view(4, 3)
    meta = ParamMeta("a", "float32", (4, 3))
    parts = {"a": [("a[0:4, 0:2]", whole[:, :2]), ("a[0:4, 2:3]", whole[:, 2:])]}
    chunk = WeightChunk([("a", whole)], {"a": "claimed"}, parts=parts)
    engine = Keeping()
    with ThreadPoolExecutor(1) as thread:
        receiver = WeightReceiver(engine, "here", thread)
        receiver.connect(TransferPlan("any", (meta,), ((0,),), 64, 1, "session"), Delivering(chunk))
        sums = await receiver.receive(1, 30.0, "wait")
    assert sums.parameters == engine.given == {"a": checksum(whole)}
    assert sums.sent == {"a[0:4, 0:2]": checksum(whole[:, :2]), "a[0:4, 2:3]": checksum(whole[:, 2:])}


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
    assert committed.version == engine.version == 2
