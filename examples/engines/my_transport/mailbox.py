"""A weight transport within a process: it hands tensors to the replica, bucket by bucket."""

import threading
import time

from enginehouse.engines import WeightChunk, WeightSyncError, WeightUpdateAborted
from enginehouse.weights import checksum, in_plan_order, plan_transfer

_boxes = {}


class _Box:
    """State that sender and receiver share. Hold `changed` to read or write it."""

    def __init__(self, plan):
        self.plan = plan
        self.changed = threading.Condition()
        self.begun = self.aborted = -1  # versions
        self.closed = False
        self.bucket = None  # the bucket in transfer, with its number
        self.taken = 0  # buckets of the update that the receiver is done with

    def wait(self, ready, version, until):
        """Wait for `ready()`. Raise if the update was aborted, the box closed, or the deadline passed."""
        over = lambda: self.aborted >= version or self.closed  # noqa: E731
        self.changed.wait_for(lambda: ready() or over(), max(0.0, until - time.monotonic()))
        if self.aborted >= version or (self.closed and not ready()):
            raise WeightUpdateAborted(f"weight update {version} was aborted")
        if not ready():
            raise WeightSyncError(f"weight update {version}: the other side did not come in time")


class Mailbox:
    """`WeightTransport`: training rank i sends to replica i, which is in the same process."""

    def prepare(self, parameters, receivers, session, bucket_bytes, senders=1):
        return plan_transfer("my_transport", parameters, receivers, session, bucket_bytes, senders)

    def connect(self, plan, side, index):
        key = (plan.session, index)
        if side == "send":
            _boxes[key] = _Box(plan)
        elif key not in _boxes:
            raise WeightSyncError(f"my_transport: training rank {index} is not in this process")
        return End(_boxes[key], key, idle=index >= plan.receivers)


class End:
    """`TransportSession` of the sender or of the receiver."""

    def __init__(self, box, key, idle):
        self._box, self._key, self._idle = box, key, idle

    def send(self, version, weights, deadline_seconds):
        source = iter(weights)
        try:
            return {} if self._idle else self._send(version, source, time.monotonic() + deadline_seconds)
        except BaseException:
            self.abort(version)
            raise
        finally:
            for _ in source:  # gathering weights may be collective
                pass

    def _send(self, version, source, until):
        box, sums = self._box, {}
        with box.changed:
            if version <= box.begun:
                raise WeightSyncError(f"weight update {version} is not newer than {box.begun}")
            box.begun, box.taken, box.bucket = version, 0, None
            box.changed.notify_all()
        ordered = in_plan_order(box.plan, source)  # raises if these are not the planned parameters
        for number, bucket in enumerate(box.plan.buckets):
            tensors = []
            for _ in bucket:
                parameter, tensor = next(ordered)
                sums[parameter.name] = checksum(tensor)  # of the bytes that leave
                tensors.append((parameter.name, tensor.detach()))
            with box.changed:
                box.wait(lambda number=number: box.taken >= number, version, until)
                box.bucket = (number, tensors)
                box.changed.notify_all()
        for _ in ordered:
            pass
        with box.changed:
            box.wait(lambda: box.taken == len(box.plan.buckets), version, until)
        return sums

    def recv(self, version, deadline_seconds):
        box, until = self._box, time.monotonic() + deadline_seconds
        try:
            for number in range(len(box.plan.buckets)):
                with box.changed:
                    box.wait(lambda: box.begun > version or self._there(version), version, until)
                    if box.begun > version:
                        raise WeightSyncError(f"the receiver waits for update {version}, but {box.begun} has begun")
                    _, tensors = box.bucket
                yield WeightChunk(tensors)
                with box.changed:
                    box.bucket, box.taken = None, number + 1
                    box.changed.notify_all()
        except BaseException:  # GeneratorExit too: a receiver that stops early
            self.abort(version)
            raise

    def _there(self, version):
        return self._box.begun == version and self._box.bucket is not None

    def abort(self, version):
        with self._box.changed:
            self._box.aborted = max(self._box.aborted, version)
            self._box.changed.notify_all()

    def close(self):
        with self._box.changed:
            self._box.closed, self._box.bucket = True, None
            self._box.changed.notify_all()
        if _boxes.get(self._key) is self._box:
            del _boxes[self._key]
