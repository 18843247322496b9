"""Faults for weight-sync tests: transports that damage what they carry, and engines that lie about what they serve.

Fakes, for what real transports and engines do only when broken. In a module of its own: worker
processes import it.
"""

import asyncio
import dataclasses
import threading

import torch

from enginehouse.controller import register
from enginehouse.data import Ragged
from enginehouse.engines.weights import WeightChunk, WeightState, WeightSyncError
from enginehouse.errors import EnginehouseError
from enginehouse.roles.workers import RolloutWorker, TrainWorker
from enginehouse.weights.checksums import checksum
from enginehouse.weights.transports.inproc import InprocTransport
from enginehouse.weights.transports.shared_memory import SharedMemoryTransport
from enginehouse_torch.rollout import TorchRolloutEngine

PARAMETER = "model.norm.weight"
"""What is damaged."""
VERSION = 2
"""The update that goes wrong."""
UNFINISHED_VERSION = 5
"""The update that one of two replicas does not switch to."""


class FaultySession:
    """A session whose receiver damages `PARAMETER` at `VERSION`."""

    def __init__(self, session, fault):
        self._session, self._fault = session, fault
        self.send, self.abort, self.close = session.send, session.abort, session.close

    def recv(self, version, deadline_seconds):
        for chunk in self._session.recv(version, deadline_seconds):
            if version == VERSION and PARAMETER in dict(chunk.tensors):
                chunk = self._fault(chunk)
            if chunk is not None:
                yield chunk


def flip_a_bit(chunk):
    def damaged(name, tensor):
        if name == PARAMETER:
            tensor = tensor.clone()
            tensor.view(torch.uint8).view(-1)[1] ^= 1
        return name, tensor

    return WeightChunk([damaged(*item) for item in chunk.tensors])


def drop(chunk):
    return None


class _Faulty:
    fault = staticmethod(drop)

    def connect(self, plan, side, index):
        session = super().connect(plan, side, index)  # type: ignore[misc]
        return FaultySession(session, self.fault) if side == "recv" and index == plan.receivers - 1 else session


class CorruptingInproc(_Faulty, InprocTransport):
    fault = staticmethod(flip_a_bit)


class DroppingInproc(_Faulty, InprocTransport):
    pass


class CorruptingSharedMemory(_Faulty, SharedMemoryTransport):
    fault = staticmethod(flip_a_bit)


class DroppingSharedMemory(_Faulty, SharedMemoryTransport):
    pass


class StaleEngine(TorchRolloutEngine):
    """Says it serves the new weights, with the right checksums, and computes with the old ones."""

    async def start_weight_update(self, update):
        await super().start_weight_update(update)
        self.sums = {}

    async def update_weights(self, chunk):
        self.sums |= {name: checksum(tensor) for name, tensor in chunk.tensors}

    async def finish_weight_update(self, version):
        await super().abort_weight_update()
        self.pretended = version

    async def weight_state(self):
        return WeightState(self.pretended, self.sums)


class LyingEngine(StaleEngine):
    """Says of each completion, too, that it is of the version that it pretends to serve."""

    async def generate(self, request):
        result = await super().generate(request)
        claimed = {"first_version": self.pretended, "last_version": self.pretended}
        completions = [dataclasses.replace(one, **claimed) for one in result.completions]
        return dataclasses.replace(result, completions=completions)


class UnreadableEngine(TorchRolloutEngine):
    """Cannot be read back, and copies what it is sent: it does not declare `lent_weights`."""

    async def update_weights(self, chunk):
        await super().update_weights(dataclasses.replace(chunk, loan=None))

    async def weight_state(self):
        return WeightState((await super().weight_state()).version)


class LaterUnreadableEngine(TorchRolloutEngine):
    """Cannot be read back from the version after `VERSION` on."""

    async def weight_state(self):
        state = await super().weight_state()
        return state if state.version <= VERSION else WeightState(state.version)


class PartlyReadEngine(UnreadableEngine):
    """Reads back its norms, and says so."""

    async def weight_state(self):
        state = await TorchRolloutEngine.weight_state(self)
        read = {name: value for name, value in state.checksums.items() if "norm" in name}
        unread = [name for name in state.checksums if name not in read]
        return WeightState(state.version, read, unread)


class PartlyReadOlderEngine(PartlyReadEngine):
    """Holds an older norm than it was sent."""

    async def weight_state(self):
        state = await super().weight_state()
        return dataclasses.replace(state, checksums={**state.checksums, "model.norm.weight": "0" * 16})


class PartlySilentEngine(PartlyReadEngine):
    """Says nothing of a norm: neither that it holds it nor that it cannot read it."""

    async def weight_state(self):
        state = await super().weight_state()
        read = {name: value for name, value in state.checksums.items() if name != "model.norm.weight"}
        return dataclasses.replace(state, checksums=read)


class UnpromisingEngine(UnreadableEngine):
    """Declares nothing, and refuses whatever it has not declared."""

    async def generate(self, request):
        sampling = request.sampling
        if sampling.seed is not None or sampling.stop or sampling.prompt_logprobs:
            raise EnginehouseError(f"this engine does not declare what it is asked for: {sampling}")
        return await super().generate(request)

    async def pause(self, mode="wait"):
        if mode in ("keep", "keep_cache"):
            raise EnginehouseError(f"this engine does not declare pause_{mode}")
        await super().pause(mode)

    async def sleep(self, *tags):
        raise EnginehouseError("this engine does not declare sleep")


class DroppingEngine(UnreadableEngine):
    """Cannot be read back, drops updates, and says it serves them."""

    async def finish_weight_update(self, version):
        self._weights.discard()
        self._weights.version = version


class DroppingOnceEngine(DroppingEngine):
    """Drops the update to `dropped`."""

    dropped = VERSION

    async def finish_weight_update(self, version):
        await (super() if version == self.dropped else super(DroppingEngine, self)).finish_weight_update(version)


class DroppingLaterEngine(DroppingOnceEngine):
    """Takes the first update that changes weights, and drops the next."""

    dropped = VERSION + 1


class QuantizedEngine(UnreadableEngine):
    """Serves the matrices of its layers with eight bits a number."""

    async def update_weights(self, chunk):
        tensors = [(name, in_eight_bits(tensor) if "_proj" in name else tensor) for name, tensor in chunk.tensors]
        await super().update_weights(dataclasses.replace(chunk, tensors=tensors))


def in_eight_bits(weights):
    scales = weights.float().abs().amax(-1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
    return ((weights.float() / scales).to(torch.float8_e4m3fn).float() * scales).to(weights.dtype)


class QuantizedDroppingLaterEngine(QuantizedEngine, DroppingLaterEngine):
    """As `DroppingLaterEngine`, quantized."""


class PartlyDroppingEngine(UnreadableEngine):
    """Cannot be read back, and never takes the weights of one layer's MLP."""

    async def finish_weight_update(self, version):
        never = {name: one.detach().clone() for name, one in self._weights._parameters.items() if "0.mlp" in name}
        assert never
        await super().finish_weight_update(version)
        for name, value in never.items():
            self._weights._parameters[name].data.copy_(value)


class UnreadableRolloutWorker(RolloutWorker):
    engine_type = UnreadableEngine

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.engine = self.engine_type()


class LaterUnreadableRolloutWorker(UnreadableRolloutWorker):
    engine_type = LaterUnreadableEngine


class PartlyReadRolloutWorker(UnreadableRolloutWorker):
    engine_type = PartlyReadEngine


class PartlyReadOlderRolloutWorker(UnreadableRolloutWorker):
    engine_type = PartlyReadOlderEngine


class PartlySilentRolloutWorker(UnreadableRolloutWorker):
    engine_type = PartlySilentEngine


class UnpromisingRolloutWorker(UnreadableRolloutWorker):
    engine_type = UnpromisingEngine

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._record = dataclasses.replace(self._record, capabilities=frozenset())


class DroppingRolloutWorker(UnreadableRolloutWorker):
    engine_type = DroppingEngine


class QuantizedRolloutWorker(UnreadableRolloutWorker):
    engine_type = QuantizedEngine


class QuantizedDroppingLaterRolloutWorker(UnreadableRolloutWorker):
    engine_type = QuantizedDroppingLaterEngine


class PartlyDroppingRolloutWorker(UnreadableRolloutWorker):
    engine_type = PartlyDroppingEngine


class DroppingOnceRolloutWorker(UnreadableRolloutWorker):
    engine_type = DroppingOnceEngine


class DroppingLaterRolloutWorker(UnreadableRolloutWorker):
    engine_type = DroppingLaterEngine


class QueueingEngine(TorchRolloutEngine):
    """Begins what it was given when it has switched to other weights, as if its queue had been that long until then."""

    def __init__(self):
        super().__init__()
        self.holds_one = threading.Event()
        self.switched = asyncio.Event()

    async def generate(self, request):
        if request.sampling.max_tokens:
            self.holds_one.set()
            await self.switched.wait()
        return await super().generate(request)

    async def finish_weight_update(self, version):
        await super().finish_weight_update(version)
        self.switched.set()


class QueueingRolloutWorker(RolloutWorker):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.engine = QueueingEngine()

    @register(urgent=True)
    async def holds_one(self):
        await asyncio.to_thread(self.engine.holds_one.wait, 30.0)


class MangledEngine(TorchRolloutEngine):
    """Damages a parameter after it was staged whole, and is honest about it."""

    async def weight_state(self):
        state = await super().weight_state()
        return (
            dataclasses.replace(state, checksums={**state.checksums, PARAMETER: "0" * 16}) if state.version else state
        )


class RefusingEngine(TorchRolloutEngine):
    """Refuses a parameter while it is staged, at `VERSION`."""

    async def start_weight_update(self, update):
        await super().start_weight_update(update)
        self.refuses = update.version == VERSION

    async def update_weights(self, chunk):
        await super().update_weights(chunk)
        if self.refuses:
            raise WeightSyncError(f"no room for {PARAMETER!r}", [PARAMETER])


class UnfinishedEngine(TorchRolloutEngine):
    """Takes all of an update and refuses to switch to it, on rank 1 at `UNFINISHED_VERSION`."""

    async def launch(self, model, options, context):
        self.rank = context.rank
        return await super().launch(model, options, context)

    async def finish_weight_update(self, version):
        if self.rank == 1 and version == UNFINISHED_VERSION:
            raise WeightSyncError("cannot switch")
        await super().finish_weight_update(version)

    async def health(self):
        return dataclasses.replace(await super().health(), running_tokens=100)


class StuckEngine(TorchRolloutEngine):
    """Never comes to rest."""

    async def pause(self, mode="abort"):
        await asyncio.Event().wait()


class StuckRolloutWorker(RolloutWorker):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.engine = StuckEngine()


class UnfinishedRolloutWorker(RolloutWorker):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.engine = UnfinishedEngine()


class UnresumedRolloutWorker(RolloutWorker):
    """Does not answer again after `VERSION`."""

    async def resume_weights(self, version):
        if version == VERSION:
            raise RuntimeError("did not wake up")
        await super().resume_weights(version)


class MeetingTrainWorker(TrainWorker):
    """Computes only while a `MeetingRolloutWorker` in its process switches: each waits until the other has begun."""

    meeting = threading.Barrier(2, timeout=20)
    aborted = threading.Event()
    computed = threading.Event()

    @register(dispatch="dp", collect="concat")
    async def forward(self, batch, outputs):
        await asyncio.to_thread(self.meeting.wait)
        if MeetingRolloutWorker.refuses:
            await asyncio.to_thread(self.aborted.wait, 20)
        computed = await asyncio.to_thread(super().forward, batch, outputs)
        self.computed.set()
        return computed

    async def abort_weights(self, version):
        await super().abort_weights(version)
        self.aborted.set()


class MeetingRolloutWorker(RolloutWorker):
    refuses = False

    async def commit_weights(self, version):
        await asyncio.to_thread(MeetingTrainWorker.meeting.wait)
        if self.refuses:
            raise WeightSyncError("no switch today")
        return await super().commit_weights(version)


class StaleRolloutWorker(RolloutWorker):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.engine = StaleEngine()


class MangledRolloutWorker(RolloutWorker):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.engine = MangledEngine()


class RefusingRolloutWorker(RolloutWorker):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.engine = RefusingEngine()


class DriftingTrainWorker(TrainWorker):
    """Rank 1 comes to hold other weights than rank 0."""

    @register
    def drift(self):
        if self.context.rank == 1:
            next(tensor for name, tensor in self.engine.weight_source().iter_full() if name == PARAMETER).add_(1)


class WanderingTrainWorker(TrainWorker):
    """Computes other last bits each time, as kernels that are not reproducible do."""

    calls = 0

    @register(dispatch="dp", collect="concat")
    def forward(self, batch, outputs):
        self.calls += 1
        found = super().forward(batch, outputs)
        column = found["logprobs"]
        return found.with_columns(logprobs=Ragged(column.values * (1 + self.calls * 1e-6), column.offsets))


class HalfWayTrainWorker(TrainWorker):
    """Fails in the middle of giving its weights, at `VERSION`."""

    def send_weights(self, version, deadline_seconds):
        engine = self.engine

        class Failing:
            def weight_source(self):
                return self

            def iter_full(self):
                for number, item in enumerate(engine.weight_source().iter_full()):
                    if version == VERSION and number == 3:
                        raise RuntimeError("gathering failed")
                    yield item

            iter_local = iter_full  # of one rank

        self.engine = Failing()
        try:
            return super().send_weights(version, deadline_seconds)
        finally:
            self.engine = engine
