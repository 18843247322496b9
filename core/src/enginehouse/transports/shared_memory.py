"""Weights between processes of one host, through shared memory: one sender, any number of receivers.

Training rank 0 makes one segment: a header and two buckets. It copies parameters into one bucket while the receivers
read the other as tensors that view the segment. The header counts: each published bucket has a sequence number,
and each receiver says which it took last; a bucket is used again when all have taken it.

Once every receiver is attached the segment's name is removed, so that nothing is left over whoever is killed; before
that, Python's resource tracker removes it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from enginehouse.engines.weights import (
    ALIGNMENT,
    ParamMeta,
    TransferPlan,
    TransportSession,
    WeightChunk,
    WeightSyncError,
    WeightUpdateAborted,
    copy_with_checksum,
)
from enginehouse.transports.buckets import in_plan_order, layout, plan_transfer
from enginehouse.transports.deadline import Deadline
from enginehouse.transports.segment import Segment
from enginehouse.transports.sender import IdleSender, Sender

if TYPE_CHECKING:
    import torch

SLOTS = 2
"""Buckets in the segment: one is written while the other is read."""

_WORD = 8
_LINE = ALIGNMENT // _WORD  # words in a cache line; what different processes write lies in different lines

# Words of the header's lines
_BEGUN, _FIRST, _CLOSED = 0, 1, 2  # line 0: newest update begun, sequence number of its first bucket, sender gone
_ABORTED = 0  # line 1: updates up to this version fail; the one word both sides write
_SEQUENCE, _VERSION, _BUCKET = 0, 1, 2  # a line for each slot: sequence number, version, number of the bucket
_ATTACHED, _TAKEN = 0, 1  # a line for each receiver: it is there, sequence number of the last bucket it took

_POLLS_BEFORE_NAPPING = 50
_SHORTEST_NAP_SECONDS = 20e-6
_LONGEST_NAP_SECONDS = 1e-3
_NAP_SHARE = 1 / 32
"""A nap is this part of the wait until then: so much later than necessary a wait ends at most."""


class SharedMemoryTransport:
    """Copies weights through shared memory to all rollout replicas of the host."""

    def prepare(self, parameters: Sequence[ParamMeta], receivers: int, session: str, bucket_bytes: int) -> TransferPlan:
        """See `WeightTransport`."""
        return plan_transfer("shared_memory", parameters, receivers, session, bucket_bytes)

    def connect(self, plan: TransferPlan, side: str, index: int) -> TransportSession:
        """See `WeightTransport`.

        Raises:
            WeightSyncError: not enough shared memory, or the sender is on another host.
        """
        if side == "send":
            return SharedMemorySender(plan) if index == 0 else IdleSender()
        return SharedMemoryReceiver(plan, index)


class Ring:
    """The segment's layout: a header of counters, and `SLOTS` buckets."""

    def __init__(self, plan: TransferPlan, create: bool):
        import torch

        self.plan = plan
        self._data_begin = (2 + SLOTS + plan.receivers) * ALIGNMENT
        name = Segment.name_of(plan.session)
        if create:
            self.segment = Segment.create(name, self._data_begin + SLOTS * plan.bucket_bytes)
        else:
            self.segment = Segment.attach(name)
        self._words = memoryview(self.segment.memory).cast("q")
        self._bytes = torch.frombuffer(self.segment.memory, dtype=torch.uint8)
        self._views: dict[tuple[int, int], list[tuple[ParamMeta, torch.Tensor]]] = {}
        self._fence = threading.Lock()
        self.closed = False  # this end
        if create:
            self.begun = self.aborted = -1

    def __getitem__(self, at: tuple[int, int]) -> int:
        line, word = at
        return self._words[line * _LINE + word]

    def __setitem__(self, at: tuple[int, int], value: int) -> None:
        line, word = at
        self._words[line * _LINE + word] = value

    def slot(self, sequence: int) -> int:
        """Header line of the slot that bucket `sequence` goes through."""
        return 2 + sequence % SLOTS

    def receiver(self, index: int) -> int:
        """Header line of a receiver."""
        return 2 + SLOTS + index

    @property
    def begun(self) -> int:
        """Version of the newest update begun."""
        return self[0, _BEGUN]

    @begun.setter
    def begun(self, version: int) -> None:
        self[0, _BEGUN] = version

    @property
    def aborted(self) -> int:
        """Updates up to this version fail."""
        return self[1, _ABORTED]

    @aborted.setter
    def aborted(self, version: int) -> None:
        self[1, _ABORTED] = version

    def fence(self) -> None:
        """Order memory accesses before and after, as other processes see them (needed off x86).

        Python has no memory barrier, but a lock is one in each direction, and two in a row are a full one.
        """
        for _ in range(2):
            with self._fence:
                pass

    def views(self, sequence: int, bucket: int) -> list[tuple[ParamMeta, torch.Tensor]]:
        """The parameters of `bucket` as tensors that view the slot of `sequence`."""
        import torch

        key = (sequence % SLOTS, bucket)
        if key not in self._views:
            begin = self._data_begin + key[0] * self.plan.bucket_bytes
            self._views[key] = [
                (
                    parameter,
                    self._bytes[begin + offset : begin + offset + parameter.nbytes]
                    .view(getattr(torch, parameter.dtype))
                    .view(parameter.shape),
                )
                for parameter, offset in layout(self.plan, bucket)
            ]
        return self._views[key]

    def wait(self, ready: Callable[[], bool], version: int, deadline: Deadline, missing: Callable[[], str]) -> None:
        """Poll until `ready()`.

        Raises:
            WeightUpdateAborted: `version` was aborted, or an end is closed.
            WeightSyncError: the deadline passed; `missing()` says what did not happen.
        """
        polls = 0
        begun = time.monotonic()
        self.check(version)
        while not ready():
            self.check(version)
            if deadline.passed:
                raise WeightSyncError(f"weight update {version}: {missing()} within {deadline.seconds:g} s")
            if polls < _POLLS_BEFORE_NAPPING:
                polls += 1
                time.sleep(0)
            else:
                nap = (time.monotonic() - begun) * _NAP_SHARE
                time.sleep(min(max(nap, _SHORTEST_NAP_SECONDS), _LONGEST_NAP_SECONDS))
        self.fence()

    def check(self, version: int) -> None:
        """Raise `WeightUpdateAborted` if `version` was aborted or an end is closed."""
        if self.aborted >= version:
            raise WeightUpdateAborted(f"weight update {version} was aborted")
        if self.closed or self[0, _CLOSED]:
            raise WeightUpdateAborted(f"weight update {version}: the connection was closed")

    def abort(self, version: int) -> None:
        """Make updates up to `version` fail on every side."""
        self.aborted = max(self.aborted, version)


class SharedMemorySender(Sender):
    """The end of training rank 0."""

    def __init__(self, plan: TransferPlan):
        self._plan = plan
        self._ring = Ring(plan, create=True)
        self._sequence = 0  # of the last bucket published

    def _send(self, version: int, source: Iterator[tuple[str, torch.Tensor]], deadline: Deadline) -> dict[str, str]:
        ring = self._ring
        if version <= ring.begun:
            raise WeightSyncError(f"weight update {version} is not newer than {ring.begun}, the last one begun")
        ring.check(version)
        first = self._sequence + 1
        ring[0, _FIRST] = first
        ring.fence()
        ring.begun = version
        sums: dict[str, str] = {}
        planned = in_plan_order(self._plan, source)
        for bucket in range(len(self._plan.buckets)):
            sequence = self._sequence + 1
            if sequence - SLOTS >= first:
                self._wait_taken(sequence - SLOTS, first, version, deadline)
            self._drop_name()
            slot = ring.slot(sequence)
            ring[slot, _SEQUENCE] = 0  # readers of an aborted update see that what they read is no longer theirs
            ring.fence()
            for _, view in ring.views(sequence, bucket):
                parameter, tensor = next(planned)
                tensor = tensor.detach().to("cpu").contiguous()
                sums[parameter.name] = copy_with_checksum(tensor, view)
            ring.check(version)
            ring[slot, _VERSION] = version
            ring[slot, _BUCKET] = bucket
            ring.fence()
            ring[slot, _SEQUENCE] = self._sequence = sequence
        for _ in planned:  # raises where there is more than was planned
            pass
        self._wait_taken(self._sequence, first, version, deadline)
        return sums

    def _drop_name(self) -> None:
        """Once nobody needs the segment's name any more, remove it: what has no name cannot be left over."""
        ring = self._ring
        if all(ring[ring.receiver(index), _ATTACHED] for index in range(self._plan.receivers)):
            ring.segment.unlink()

    def _wait_taken(self, sequence: int, first: int, version: int, deadline: Deadline) -> None:
        ring = self._ring

        def behind() -> list[int]:
            return [i for i in range(self._plan.receivers) if ring[ring.receiver(i), _TAKEN] < sequence]

        def missing() -> str:
            late = ", ".join(
                f"{index}{'' if ring[ring.receiver(index), _ATTACHED] else ' (never connected)'}" for index in behind()
            )
            return f"rollout replica {late} did not take bucket {sequence - first + 1} of {len(self._plan.buckets)}"

        if len(self._plan.buckets):
            ring.wait(lambda: not behind(), version, deadline, missing)

    def abort(self, version: int) -> None:
        """See `TransportSession`."""
        self._ring.abort(version)

    def close(self) -> None:
        """See `TransportSession`. The memory goes with the last tensor that views it."""
        self._ring[0, _CLOSED] = 1
        self._ring.segment.unlink()


class SharedMemoryReceiver:
    """A rollout replica's end."""

    def __init__(self, plan: TransferPlan, index: int):
        self._plan = plan
        try:
            self._ring = Ring(plan, create=False)
        except FileNotFoundError as error:
            raise WeightSyncError(
                f"rollout replica {index} does not see the shared memory of training rank 0. Transport 'shared_memory' "
                "needs both on one host; choose another transport."
            ) from error
        self._line = self._ring.receiver(index)
        self._ring[self._line, _ATTACHED] = 1

    def send(
        self, version: int, weights: Iterable[tuple[str, torch.Tensor]], deadline_seconds: float
    ) -> dict[str, str]:
        """Not for a receiver's end."""
        raise TypeError("a rollout replica does not send weights")

    def recv(self, version: int, deadline_seconds: float) -> Iterator[WeightChunk]:
        """See `TransportSession`."""
        deadline = Deadline(deadline_seconds)
        try:
            yield from self._recv(version, deadline)
        except BaseException:  # GeneratorExit too: a receiver that stops early ends the update for the sender
            self.abort(version)
            raise

    def _recv(self, version: int, deadline: Deadline) -> Iterator[WeightChunk]:
        ring = self._ring
        count = len(self._plan.buckets)
        ring.wait(lambda: ring.begun >= version, version, deadline, lambda: "the trainer did not begin to send")
        if ring.begun > version:
            raise WeightSyncError(f"weight update {version} was expected, the trainer is already at {ring.begun}")
        first = ring[0, _FIRST]
        for bucket in range(count):
            sequence = first + bucket
            slot = ring.slot(sequence)
            arrived = f"bucket {bucket + 1} of {count}"
            ring.wait(
                lambda slot=slot, sequence=sequence: ring[slot, _SEQUENCE] >= sequence,  # type: ignore[misc]
                version,
                deadline,
                lambda arrived=arrived: f"{arrived} did not arrive",  # type: ignore[misc]
            )
            self._check_slot(slot, sequence, version, bucket)
            yield WeightChunk([(parameter.name, view) for parameter, view in ring.views(sequence, bucket)])
            ring.check(version)
            self._check_slot(slot, sequence, version, bucket)
            ring[self._line, _TAKEN] = sequence

    def _check_slot(self, slot: int, sequence: int, version: int, bucket: int) -> None:
        ring = self._ring
        found = (ring[slot, _SEQUENCE], ring[slot, _VERSION], ring[slot, _BUCKET])
        if found != (sequence, version, bucket):
            raise WeightSyncError(
                f"weight update {version}: expected bucket {bucket + 1} (sequence {sequence}), found bucket "
                f"{found[2] + 1} of version {found[1]} (sequence {found[0]})",
                [parameter.name for parameter, _ in layout(self._plan, bucket)],
            )

    def abort(self, version: int) -> None:
        """See `TransportSession`."""
        self._ring.abort(version)

    def close(self) -> None:
        """See `TransportSession`."""
        self._ring.closed = True
