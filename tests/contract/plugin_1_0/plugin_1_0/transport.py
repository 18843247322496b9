"""A transport: one mailbox within a process, on which both ends wait."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch

from enginehouse.engines import ParamMeta, TransferPlan, WeightChunk, WeightSyncError
from enginehouse.engines.weights import WeightUpdateAborted
from enginehouse.weights.buckets import plan_transfer
from enginehouse.weights.checksums import checksum

_boxes: dict[tuple[str, int], Box] = {}


class Box:
    """What the two ends share: parameters on their way, and answers."""

    def __init__(self, plan: TransferPlan):
        self.plan = plan
        self.sent: queue.Queue = queue.Queue(maxsize=1)
        self.taken: queue.Queue = queue.Queue(maxsize=1)
        self.aborted = 0


class Mailbox:
    """`WeightTransport` within a process: training rank i sends to replica i."""

    def prepare(
        self, parameters: Sequence[ParamMeta], receivers: int, session: str, bucket_bytes: int, senders: int = 1
    ) -> TransferPlan:
        """Plan as core's own does, but for one parameter a bucket."""
        plan = plan_transfer("elder", parameters, receivers, session, bucket_bytes, senders)
        return replace(plan, buckets=tuple((number,) for number in range(len(parameters))))

    def connect(self, plan: TransferPlan, side: str, index: int) -> End:
        """Open an end."""
        key = (plan.session, index)
        if side == "send":
            _boxes[key] = Box(plan)
        if key not in _boxes:
            raise WeightSyncError(f"transport 'elder': training rank {index} is not in this process")
        return End(_boxes[key], idle=index >= plan.receivers)


class End:
    """`TransportSession`, either end."""

    def __init__(self, box: Box, idle: bool = False):
        self._box = box
        self._idle = idle

    def send(
        self, version: int, weights: Iterable[tuple[str, torch.Tensor]], deadline_seconds: float
    ) -> dict[str, str]:
        """Send one parameter after the other."""
        until = time.monotonic() + deadline_seconds
        sums: dict[str, str] = {}
        if self._idle:
            for _ in weights:
                pass
            return sums
        for name, tensor in weights:
            sums[name] = checksum(tensor)
            self._put(self._box.sent, (version, name, tensor.detach()), version, until)
            self._get(self._box.taken, version, until)
        self._put(self._box.sent, (version, None, None), version, until)
        self._get(self._box.taken, version, until)
        return sums

    def recv(self, version: int, deadline_seconds: float) -> Iterator[WeightChunk]:
        """Yield each parameter."""
        until = time.monotonic() + deadline_seconds
        while True:
            arrived, name, tensor = self._get(self._box.sent, version, until)
            if arrived != version:
                raise WeightSyncError(f"weight update {version} was expected, {arrived} arrived")
            if name is not None:
                yield WeightChunk([(name, tensor)])
            self._put(self._box.taken, True, version, until)
            if name is None:
                return

    def abort(self, version: int) -> None:
        """Make both ends of an update give up."""
        self._box.aborted = max(self._box.aborted, version)

    def close(self) -> None:
        """Forget the box."""
        for key in [key for key, box in _boxes.items() if box is self._box]:
            del _boxes[key]

    def _put(self, to: queue.Queue, what: object, version: int, until: float) -> None:
        self._until(lambda: to.put(what, timeout=0.05), queue.Full, version, until)

    def _get(self, of: queue.Queue, version: int, until: float):
        return self._until(lambda: of.get(timeout=0.05), queue.Empty, version, until)

    def _until(self, action, busy: type[Exception], version: int, until: float):
        while True:
            if version <= self._box.aborted:
                raise WeightUpdateAborted(f"weight update {version} was aborted")
            try:
                return action()
            except busy:
                if time.monotonic() > until:
                    raise WeightSyncError(f"weight update {version}: the other end did not answer") from None
