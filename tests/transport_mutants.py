"""Weight transports with one property broken each: what the conformance suite exists to find."""

import torch

from enginehouse.engines.weights import WeightChunk, WeightSyncError
from enginehouse.weights.transports.inproc import InprocTransport
from enginehouse.weights.transports.shared_memory import SharedMemoryTransport
from enginehouse_transports.differences import DifferencesReceiver, DifferencesTransport
from enginehouse_transports.point_to_point import PointToPointReceiver, PointToPointTransport

LEFT = []
"""Segments that `SegmentLeft` did not remove."""


class Session:
    """One end, as it was made; what a mutant breaks it overrides."""

    def __init__(self, right):
        self.right = right

    def send(self, version, weights, deadline_seconds):
        return self.right.send(version, weights, deadline_seconds)

    def recv(self, version, deadline_seconds):
        yield from self.right.recv(version, deadline_seconds)

    def abort(self, version):
        self.right.abort(version)

    def close(self):
        self.right.close()


class Mutant(InprocTransport):
    session = Session

    def connect(self, plan, side, index):
        return self.session(super().connect(plan, side, index))


class Corrupting(Mutant):
    """One bit of a parameter arrives changed."""

    class session(Session):
        def recv(self, version, deadline_seconds):
            for chunk in self.right.recv(version, deadline_seconds):
                tensors = [(name, tensor.clone()) for name, tensor in chunk.tensors]
                for name, tensor in tensors:
                    if name == "p5":
                        tensor.view(torch.uint8)[8] ^= 1
                yield WeightChunk(tensors)


class SumsClaimed(Mutant):
    """Gives other checksums than those of what arrives."""

    class session(Session):
        def recv(self, version, deadline_seconds):
            for chunk in self.right.recv(version, deadline_seconds):
                yield WeightChunk(chunk.tensors, {name: "0" * 16 for name, _ in chunk.tensors})


class OrderLost(Mutant):
    """Parameters of a bucket arrive the other way round."""

    class session(Session):
        def recv(self, version, deadline_seconds):
            for chunk in self.right.recv(version, deadline_seconds):
                yield WeightChunk(chunk.tensors[::-1])


class StridesIgnored(Mutant):
    """Sends memory as it lies."""

    class session(Session):
        def send(self, version, weights, deadline_seconds):
            lying = ((n, t.detach().as_strided(t.shape, torch.empty(t.shape).stride(), 0)
                      if t.numel() <= t.untyped_storage().nbytes() // t.itemsize else t.detach().contiguous())
                     for n, t in weights)  # fmt: skip
            return self.right.send(version, lying, deadline_seconds)


class SumsOfOthers(Mutant):
    """Returns checksums of something else."""

    class session(Session):
        def send(self, version, weights, deadline_seconds):
            return {name: f"{sum[1:]}0" for name, sum in self.right.send(version, weights, deadline_seconds).items()}


class BucketsJoined(Mutant):
    """Gathers all before the first is sent."""

    class session(Session):
        def send(self, version, weights, deadline_seconds):
            return self.right.send(version, list(weights), deadline_seconds)


class AbortForgotten(Mutant):
    """Goes on after an abort."""

    class session(Session):
        def abort(self, version):
            pass


class AbortLasts(Mutant):
    """An abort also fails what comes after."""

    class session(Session):
        def abort(self, version):
            self.right.abort(version + 10)


class LateTaken(Mutant):
    """What misses its deadline looks as if it were all."""

    class session(Session):
        def recv(self, version, deadline_seconds):
            try:
                yield from self.right.recv(version, deadline_seconds)
            except WeightSyncError as error:
                if "within" not in str(error):
                    raise


class VersionsIgnored(Mutant):
    """Takes any version."""

    class session(Session):
        def send(self, version, weights, deadline_seconds):
            if hasattr(self.right, "_mailbox"):
                self.right._mailbox.begun = -1
            return self.right.send(version, weights, deadline_seconds)


class NotExhausted(Mutant):
    """Leaves the other ranks alone with a collective once something is wrong."""

    class session(Session):
        def send(self, version, weights, deadline_seconds):
            source = iter(weights)
            failed = []

            def given():
                for item in source:
                    if failed:
                        return
                    if item[0] == "not planned":
                        failed.append(item)
                    yield item

            return self.right.send(version, given(), deadline_seconds)


class IdleLeavesThem(Mutant):
    """A rank that sends nothing takes no part."""

    def connect(self, plan, side, index):
        made = super().connect(plan, side, index)
        if side == "send" and index >= plan.receivers:
            made.send = lambda version, weights, deadline_seconds: {}
        return made


class HoldsForgotten(SharedMemoryTransport):
    """Lends memory that it overwrites though it is held."""

    class session(Session):
        def recv(self, version, deadline_seconds):
            for chunk in self.right.recv(version, deadline_seconds):
                chunk.memory.hold = lambda: None
                yield chunk

    def connect(self, plan, side, index):
        made = super().connect(plan, side, index)
        return made if side == "send" else self.session(made)


class PartsMutant(PointToPointTransport):
    session = Session

    def connect(self, plan, side, index):
        made = self.session(super().connect(plan, side, index))
        if side == "send":
            made.sends_parts = True
            made.port = getattr(made.right, "port", 0)
        made.several = plan.senders > 1
        return made


class PartsMisplaced(PartsMutant):
    """Of several ranks each sends its rows one further."""

    class session(Session):
        def send(self, version, weights, deadline_seconds):
            rolled = ((n, t.roll(1, 0) if self.several and t.numel() else t) for n, t in weights)
            return self.right.send(version, rolled, deadline_seconds)


class PartsUnsaid(PartsMutant):
    """Does not say in which parts a parameter came."""

    class session(Session):
        def recv(self, version, deadline_seconds):
            for chunk in self.right.recv(version, deadline_seconds):
                yield WeightChunk(chunk.tensors)


class ChangesLost(DifferencesTransport):
    """Drops the changes of a part that was not sent whole."""

    class Receiver(DifferencesReceiver):
        def _note_arrival(self, heading, content):
            PointToPointReceiver._note_arrival(self, heading, content)

    def connect(self, plan, side, index):
        return self.Receiver(plan, index) if side == "recv" else super().connect(plan, side, index)


class SegmentLeft(SharedMemoryTransport):
    """Closes its end and removes nothing."""

    def connect(self, plan, side, index):
        made = super().connect(plan, side, index)
        if side == "send" and index == 0:
            LEFT.append(made._control.segment)
            made._control.segment = Kept(made._control.segment)
        return made


class Kept:
    """A segment that is not removed."""

    def __init__(self, segment):
        self.memory = segment.memory

    def unlink(self):
        pass
