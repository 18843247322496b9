"""Moves weights between processes of one host. A version is written once, and all receivers read the same memory.

Each version is written into a *buffer*: memory of training rank 0, as large as the model, which no receiver holds. Each
rank writes parts that it has itself, so nothing is gathered. Receivers read the version bucket by bucket during the
write, as tensors that view the buffer, and share the work of summing it. An engine that holds the buffer (`HostMemory`)
need not copy the weights, and the next version is written into another buffer. Usually there are two buffers: one is
served while the other is written.

Buffers have no names, so no buffer is left over if a process is killed. The `ControlBlock` is in a small shared memory
with a name, which is removed once every process is attached. If training rank 0 is killed before that, Python's
resource tracker removes the name.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from enginehouse.engines.weights import TransferPlan, TransportSession, WeightChunk, WeightSyncError
from enginehouse.weights.buckets import AHEAD, check_announced, group_by_bytes
from enginehouse.weights.checksums import TASK_BYTES, THREADS, checksum, checksums, copy_with_checksum
from enginehouse.weights.parts import as_slices, part_name, parts_of, shape_of, share_parts
from enginehouse.weights.transports.control_block import (
    ATTACHED,
    BEGUN,
    BUFFER,
    CLOSED,
    DESCRIPTOR,
    DONE,
    HOLDS,
    OPENED,
    PROCESS,
    SUMMED,
    SUMMING,
    ControlBlock,
)
from enginehouse.weights.transports.deadline import Deadline
from enginehouse.weights.transports.ends import BucketTransport, IdleSender, Receiver, Sender
from enginehouse.weights.transports.shared_buffer import HeldBuffer, MappedBuffers, SharedBuffer

if TYPE_CHECKING:
    import torch


ATTACH_SECONDS = 30.0
"""Time in which training rank 0 creates the control block, after the other ranks begin to connect."""

PATIENCE_SECONDS = 0.05
"""Time in which another replica begins to sum a bucket that has arrived. One that waits looks each millisecond."""


class SharedMemoryTransport(BucketTransport):
    """Writes weights once into memory that all rollout replicas of the host read."""

    name = "shared_memory"

    def connect(self, plan: TransferPlan, side: str, index: int) -> TransportSession:
        """Open one side of the connection; see `WeightTransport`. Raises `WeightSyncError` if there is not enough
        memory for a version, or this process cannot open the sender's memory."""
        if side == "send":
            if index == 0:
                return FirstSender(plan)
            return OtherSender(plan, index) if index < plan.senders else IdleSender()
        return SharedMemoryReceiver(plan, index)


class SharedMemorySender(Sender, ABC):
    """The sending side, at a training rank.

    Several threads copy and sum, because memory is faster than one core. They write up to three buckets at once.

    Attributes:
        sends_parts: see `PartsSession`. A single rank sends parts too, because these do not change before all are sent.
    """

    sends_parts = True
    _control: ControlBlock

    def __init__(self, plan: TransferPlan, rank: int):
        self._plan = plan
        self._rank = rank
        self._held = {parameter.name: (parameter, region) for parameter, region in parts_of(plan.parameters, rank)}
        self._writes = {  # names of the parameters of which this rank, and no other, writes the part that it holds
            parameter.name
            for parameter, share in zip(plan.parameters, share_parts(plan.parameters, plan.senders), strict=True)
            if rank in share.values()
        }

    @abstractmethod
    def _open(self, version: int, deadline: Deadline) -> SharedBuffer:
        """Return the update's buffer."""

    def _send(self, version: int, source: Iterator[tuple[str, torch.Tensor]], deadline: Deadline) -> dict[str, str]:
        buffer = self._open(version, deadline)
        control, count = self._control, len(self._plan.buckets)
        sums: dict[str, str] = {}
        planned = check_announced(((parameter, shape_of(region)) for parameter, region in self._held.values()), source)
        writing: deque[list[Future[dict[str, str]]]] = deque()  # by bucket, the tasks of the threads

        def find_parts(bucket: int) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
            """Yield name, tensor and place of each part of a bucket that this rank writes."""
            for parameter, view in buffer.view_bucket(bucket):
                if parameter.name not in self._held:
                    continue
                _, tensor = next(planned)
                if parameter.name in self._writes:
                    region = self._held[parameter.name][1]
                    yield part_name(parameter, region), tensor.detach(), view[as_slices(region)]

        def finish_oldest(bucket: int) -> None:
            for task in writing.popleft():
                sums.update(task.result())
            control.check(version)
            control.fence()
            control[control.sender(self._rank), DONE] = control.number(version, bucket)
            deadline.restart()

        with ThreadPoolExecutor(THREADS, "weights") as threads:
            for bucket in range(count):
                writing.append([])
                for task in group_by_bytes(find_parts(bucket), lambda part: part[1].nbytes, TASK_BYTES):
                    writing[-1].append(threads.submit(_write_all, task))
                if len(writing) > AHEAD:
                    finish_oldest(bucket - AHEAD)
            while writing:
                finish_oldest(count - len(writing))
        for _ in planned:  # raises if there are surplus weights
            pass
        for bucket in range(count):
            self._wait_taken(version, bucket, deadline)
        return sums

    def _wait_taken(self, version: int, bucket: int, deadline: Deadline) -> None:
        control = self._control
        number = control.number(version, bucket)

        def missing() -> str:
            late = ", ".join(
                f"{index}{'' if control[control.receiver(index), ATTACHED] else ' (never connected)'}"
                for index in control.not_taken(number)
            )
            return f"rollout replica {late} did not take bucket {bucket + 1} of {len(self._plan.buckets)}"

        control.wait(lambda: not control.not_taken(number), version, deadline, missing)

    def abort(self, version: int) -> None:
        self._control.abort(version)


def _write_all(parts: list[tuple[str, torch.Tensor, torch.Tensor]]) -> dict[str, str]:
    """Copy tensors to their places, and return their checksums by name."""
    return {name: _write(tensor, target) for name, tensor, target in parts}


def _write(tensor: torch.Tensor, target: torch.Tensor) -> str:
    """Copy a tensor of any device to a part of a buffer, and return its checksum."""
    tensor = tensor.to("cpu").contiguous()
    if target.is_contiguous():
        return copy_with_checksum(tensor, target)
    target.copy_(tensor)
    return checksum(tensor)


class FirstSender(SharedMemorySender):
    """The sending side at training rank 0, which owns the buffers."""

    def __init__(self, plan: TransferPlan):
        super().__init__(plan, 0)
        self._serial = 0  # serial number of the newest buffer
        self._control = ControlBlock(plan, create=True)  # before a buffer, which takes long: other ranks wait for it
        self._control[PROCESS] = os.getpid()
        self._buffers: list[SharedBuffer] = []
        try:
            self._buffers.append(self._new_buffer())
        except BaseException:
            self.close()
            raise
        self._announce(self._buffers[0])

    def _new_buffer(self) -> SharedBuffer:
        buffer = SharedBuffer.create(self._plan, self._serial + 1)
        self._serial += 1
        return buffer

    def _announce(self, buffer: SharedBuffer) -> None:
        self._control[BUFFER] = buffer.serial
        self._control[DESCRIPTOR] = buffer.descriptor

    def _find_unheld(self) -> SharedBuffer:
        """Return a buffer that nobody holds, if necessary a new buffer. Free all other buffers that nobody holds."""
        held = self._control.held_serials()
        free = [buffer for buffer in self._buffers if buffer.serial not in held] or [self._new_buffer()]
        self._buffers = [buffer for buffer in self._buffers if buffer.serial in held] + free[:1]
        return free[0]

    def _open(self, version: int, deadline: Deadline) -> SharedBuffer:
        control = self._control
        if version <= control.begun:
            raise WeightSyncError(f"weight update {version} must be newer than the last begun update, {control.begun}")
        control.check(version)
        control[BEGUN] = version  # from now on nobody can begin to hold an older version
        control.fence()
        self._unlink_once_attached()
        buffer = self._find_unheld()
        self._announce(buffer)
        control.fence()
        control[OPENED] = version
        return buffer

    def _wait_taken(self, version: int, bucket: int, deadline: Deadline) -> None:
        super()._wait_taken(version, bucket, deadline)
        self._unlink_once_attached()

    def _unlink_once_attached(self) -> None:
        if self._control.all_attached:
            self._control.segment.unlink()  # so that the name cannot be left over

    def close(self) -> None:
        """Close this side. A buffer is freed with the last receiver that holds it."""
        self._control[CLOSED] = 1
        self._control.segment.unlink()
        self._buffers.clear()


class OtherSender(SharedMemorySender):
    """The sending side at another training rank, which writes into the buffers of rank 0."""

    def __init__(self, plan: TransferPlan, rank: int):
        super().__init__(plan, rank)
        where = f"training rank {rank}"
        self._control = attach(plan, where, ATTACH_SECONDS)
        self._buffers = MappedBuffers(plan, self._control, where)
        self._control[self._control.sender(rank), ATTACHED] = 1

    def _open(self, version: int, deadline: Deadline) -> SharedBuffer:
        self._control.wait_opened(version, deadline)
        return self._buffers.open(version, self._control.held_serials())

    def close(self) -> None:
        """Close this side."""
        self._control.closed = True
        self._buffers.clear()


def attach(plan: TransferPlan, where: str, seconds: float = 0.0) -> ControlBlock:
    """Return the control block of training rank 0.

    Args:
        where: name of this process in messages.
        seconds: time in which rank 0 may create it.

    Raises:
        WeightSyncError: there is none on this host.
    """
    deadline = Deadline(seconds)
    while True:
        try:
            return ControlBlock(plan, create=False)
        except (FileNotFoundError, ValueError) as error:  # ValueError: it has no size yet
            if deadline.passed:
                raise WeightSyncError(
                    f"{where} does not see the shared memory of training rank 0. Transport 'shared_memory' needs both "
                    "processes on one host; choose another transport."
                ) from error
        time.sleep(ATTACH_SECONDS / 1000)


class SharedMemoryReceiver(Receiver):
    """The receiving side, at a rollout replica."""

    def __init__(self, plan: TransferPlan, index: int):
        self._plan = plan
        self._index = index
        where = f"rollout replica {index}"
        self._control = attach(plan, where)
        self._line = self._control.receiver(index)
        self._buffers = MappedBuffers(plan, self._control, where)
        self._words = deque(HOLDS)  # unused words of the line
        self._pieces = _find_pieces(plan)
        self._buffers.map_latest(())  # an error should come here, not at the first update
        self._control[self._line, ATTACHED] = 1

    def _recv(self, version: int, deadline: Deadline) -> Iterator[WeightChunk]:
        """Yield chunks that share one `memory`. If the engine already holds the memory of too many updates, the chunks
        have no `memory`, so that the engine must copy them. All replicas read the same bytes, so they share the
        checksums: each of N replicas sums every Nth bucket."""
        control = self._control
        control.wait_opened(version, deadline)
        buffer = self._buffers.open(version, self._held_serials())
        memory = HeldBuffer(buffer, version, control, self._line, self._words) if self._words else None
        own = self._index  # the next bucket that this replica sums
        for bucket in range(len(self._plan.buckets)):
            sums, own = self._find_sums(buffer, bucket, own, version, deadline)
            tensors = [(parameter.name, view) for parameter, view in buffer.view_bucket(bucket)]
            yield WeightChunk(tensors, sums, memory, self._find_parts(buffer, bucket))
            control.check(version)
            control.fence()
            control.check_newest(version)
            control[self._line, DONE] = control.number(version, bucket)

    def _find_sums(
        self, buffer: SharedBuffer, bucket: int, own: int, version: int, deadline: Deadline
    ) -> tuple[dict[str, str], int]:
        """Wait until another replica has written the checksums of a bucket, or sum the bucket if the other has not
        begun soon after the bucket arrived. Meanwhile, sum the bucket `own` for all replicas once it has arrived.

        Returns:
            The checksums by name, and the next bucket that this replica sums for all.
        """
        control, replicas = self._control, self._plan.receivers
        last = min(bucket + replicas, len(self._plan.buckets)) - 1  # further ones would keep this bucket waiting
        line, number = control.receiver(bucket % replicas), control.number(version, bucket)
        patience: float | None = None

        def is_decided() -> bool:
            nonlocal own, patience
            if own <= last and not control.not_written(control.number(version, own)):
                self._sum_for_all(buffer, own, version)
                own += replicas
            if control[line, SUMMED] >= number:
                return True
            if control[line, SUMMING] >= number or control.not_written(number):
                return False
            patience = patience or time.monotonic() + PATIENCE_SECONDS
            return time.monotonic() >= patience

        control.wait(is_decided, version, deadline, lambda: self._missing(bucket, number))
        pieces = self._pieces[bucket]
        if control[line, SUMMED] >= number:
            sums = {name: control.read_sum(*place) for place, name, _ in pieces}
        else:
            totals = checksums(self._view_pieces(buffer, bucket))
            sums = {name: total for (_, name, _), total in zip(pieces, totals, strict=True)}
        control.fence()
        control.check_newest(version)
        return sums, own

    def _sum_for_all(self, buffer: SharedBuffer, bucket: int, version: int) -> None:
        """Write the checksums of a bucket that has arrived."""
        control, number = self._control, self._control.number(version, bucket)
        control[self._line, SUMMING] = number
        control.fence()
        totals = checksums(self._view_pieces(buffer, bucket))
        for (place, _, _), total in zip(self._pieces[bucket], totals, strict=True):
            control.write_sum(*place, total)
        control.fence()
        control.check_newest(version)
        control[self._line, SUMMED] = number

    def _view_pieces(self, buffer: SharedBuffer, bucket: int) -> list[torch.Tensor]:
        views = dict(zip(self._plan.buckets[bucket], buffer.view_bucket(bucket), strict=True))
        return [views[index][1][slices] for (index, _), _, slices in self._pieces[bucket]]

    def _find_parts(self, buffer: SharedBuffer, bucket: int) -> dict[str, list[tuple[str, torch.Tensor]]]:
        """Return the parts of those parameters of a bucket that came in several parts."""
        parts: dict[str, list[tuple[str, torch.Tensor]]] = {}
        views = dict(zip(self._plan.buckets[bucket], buffer.view_bucket(bucket), strict=True))
        for (index, number), name, slices in self._pieces[bucket]:
            if number:
                parameter, view = views[index]
                parts.setdefault(parameter.name, []).append((name, view[slices]))
        return parts

    def _missing(self, bucket: int, number: int) -> str:
        ranks = self._control.not_written(number)
        if not ranks:
            return f"rollout replica {bucket % self._plan.receivers} did not sum {self._name(bucket)}"
        senders = f" from training rank {', '.join(map(str, ranks))}" if self._plan.senders > 1 else ""
        return f"{self._name(bucket)} did not arrive{senders}"

    def _name(self, bucket: int) -> str:
        return f"bucket {bucket + 1} of {len(self._plan.buckets)}"

    def _held_serials(self) -> set[int]:
        """Return the serial numbers of the buffers that this replica holds."""
        return {self._control[self._line, word] for word in HOLDS}

    def abort(self, version: int) -> None:
        self._control.abort(version)

    def close(self) -> None:
        """Close this side. Held buffers stay."""
        self._control.closed = True
        self._buffers.clear()


Piece = tuple[tuple[int, int], str, tuple[slice, ...]]
"""A parameter or part that has a checksum: its place in the control block, name, and index into the parameter."""


def _find_pieces(plan: TransferPlan) -> list[list[Piece]]:
    """Return for each bucket its parameters, and the parts of those that come in several parts."""
    shares = share_parts(plan.parameters, plan.senders)
    pieces: list[list[Piece]] = []
    for bucket in plan.buckets:
        pieces.append([])
        for index in bucket:
            parameter, parts = plan.parameters[index], list(shares[index])
            regions = [(parameter.name, ()), *((part_name(parameter, part), as_slices(part)) for part in parts)]
            of_it = regions if len(parts) > 1 else regions[:1]
            pieces[-1] += [((index, number), name, slices) for number, (name, slices) in enumerate(of_it)]
    return pieces
