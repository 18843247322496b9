"""Moves weights between processes of one host. A sender writes a version once, and all receivers read the same memory.

Training rank 0 writes each version into a *buffer*: memory as large as the model, which no receiver holds. Receivers
read the version bucket by bucket during the write, as tensors that view the buffer. An engine that holds the buffer
(`HostMemory`) need not copy the weights, and the next version is written into another buffer. Usually there are two
buffers: one is served while the other is written.

Buffers have no names, so no buffer is left over if a process is killed. The `ControlBlock` is in a small shared memory
with a name, which is removed once every receiver is attached. If the sender is killed before that, Python's resource
tracker removes the name.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from enginehouse.engines.weights import TransferPlan, TransportSession, WeightChunk, WeightSyncError
from enginehouse.weights.buckets import AHEAD, in_plan_order
from enginehouse.weights.checksums import copy_with_checksum
from enginehouse.weights.transports.control_block import (
    ATTACHED,
    BEGUN,
    BUFFER,
    CLOSED,
    DESCRIPTOR,
    FIRST,
    HOLDS,
    OPENED,
    PROCESS,
    TAKEN,
    WRITTEN,
    ControlBlock,
)
from enginehouse.weights.transports.deadline import Deadline
from enginehouse.weights.transports.ends import BucketTransport, IdleSender, Receiver, Sender
from enginehouse.weights.transports.shared_buffer import HeldBuffer, SharedBuffer

if TYPE_CHECKING:
    import torch


class SharedMemoryTransport(BucketTransport):
    """Writes weights once into memory that all rollout replicas of the host read."""

    name = "shared_memory"

    def connect(self, plan: TransferPlan, side: str, index: int) -> TransportSession:
        """Open one side of the connection; see `WeightTransport`. Raises `WeightSyncError` if there is not enough
        memory for a version, or this process cannot open the sender's memory."""
        if side == "send":
            return SharedMemorySender(plan) if index == 0 else IdleSender()
        return SharedMemoryReceiver(plan, index)


class SharedMemorySender(Sender):
    """The sending side, at training rank 0."""

    def __init__(self, plan: TransferPlan):
        self._plan = plan
        self._written = 0  # number of the last bucket written
        self._serial = 0  # serial number of the newest buffer
        self._buffers: list[SharedBuffer] = [self._new_buffer()]
        self._control = control = ControlBlock(plan, create=True)
        control[PROCESS] = os.getpid()
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

    def _send(self, version: int, source: Iterator[tuple[str, torch.Tensor]], deadline: Deadline) -> dict[str, str]:
        control = self._control
        if version <= control.begun:
            raise WeightSyncError(f"weight update {version} must be newer than the last begun update, {control.begun}")
        control.check(version)
        control[BEGUN] = version  # from now on nobody can begin to hold an older version
        control.fence()
        buffer = self._find_unheld()
        self._announce(buffer)
        first = control[FIRST] = self._written + 1
        control.fence()
        control[OPENED] = version
        sums: dict[str, str] = {}
        planned = in_plan_order(self._plan, source)
        for bucket in range(len(self._plan.buckets)):
            number = first + bucket
            if bucket >= AHEAD:
                self._wait_taken(number - AHEAD, first, version, deadline)
            self._drop_name()
            for _, view in buffer.view_bucket(bucket):
                parameter, tensor = next(planned)
                tensor = tensor.detach().to("cpu").contiguous()
                sums[parameter.name] = copy_with_checksum(tensor, view)
            control.check(version)
            control.fence()
            control[WRITTEN] = self._written = number
        for _ in planned:  # raises if there are surplus weights
            pass
        self._wait_taken(self._written, first, version, deadline)
        return sums

    def _drop_name(self) -> None:
        """Remove the control block's name once all receivers are attached, so that it cannot be left over."""
        control = self._control
        if all(control[control.line(index), ATTACHED] for index in range(self._plan.receivers)):
            control.segment.unlink()

    def _wait_taken(self, number: int, first: int, version: int, deadline: Deadline) -> None:
        control = self._control

        def behind() -> list[int]:
            return [i for i in range(self._plan.receivers) if control[control.line(i), TAKEN] < number]

        def missing() -> str:
            late = ", ".join(
                f"{index}{'' if control[control.line(index), ATTACHED] else ' (never connected)'}" for index in behind()
            )
            return f"rollout replica {late} did not take bucket {number - first + 1} of {len(self._plan.buckets)}"

        if len(self._plan.buckets):
            control.wait(lambda: not behind(), version, deadline, missing)

    def abort(self, version: int) -> None:
        self._control.abort(version)

    def close(self) -> None:
        """Close this side. A buffer is freed with the last receiver that holds it."""
        self._control[CLOSED] = 1
        self._control.segment.unlink()
        self._buffers.clear()


class SharedMemoryReceiver(Receiver):
    """The receiving side, at a rollout replica."""

    def __init__(self, plan: TransferPlan, index: int):
        self._plan = plan
        self._index = index
        try:
            self._control = ControlBlock(plan, create=False)
        except FileNotFoundError as error:
            raise WeightSyncError(
                f"rollout replica {index} does not see the shared memory of training rank 0. Transport 'shared_memory' "
                "needs both processes on one host; choose another transport."
            ) from error
        self._line = self._control.line(index)
        self._buffers: list[SharedBuffer] = []  # mapped buffers: the newest, and all held buffers
        self._words = deque(HOLDS)  # unused words of the line
        self._attach_latest()  # an error should come here, not at the first update
        self._control[self._line, ATTACHED] = 1

    def _recv(self, version: int, deadline: Deadline) -> Iterator[WeightChunk]:
        """Yield chunks that share one `memory`. If the engine already holds the memory of too many updates, the chunks
        have no `memory`, so that the engine must copy them."""
        control = self._control
        count = len(self._plan.buckets)
        control.wait(
            lambda: control[OPENED] >= version or control.begun > version,
            version,
            deadline,
            lambda: "the trainer did not begin to send",
        )
        self._check_newest(version)
        first, buffer = self._open_update(version)
        memory = HeldBuffer(buffer, version, control, self._line, self._words) if self._words else None
        for bucket in range(count):
            number = first + bucket
            arrived = f"bucket {bucket + 1} of {count}"
            control.wait(
                lambda number=number: control[WRITTEN] >= number,  # type: ignore[misc]
                version,
                deadline,
                lambda arrived=arrived: f"{arrived} did not arrive",  # type: ignore[misc]
            )
            self._check_newest(version)
            yield WeightChunk([(parameter.name, view) for parameter, view in buffer.view_bucket(bucket)], memory=memory)
            control.check(version)
            control.fence()
            self._check_newest(version)
            control[self._line, TAKEN] = number

    def _check_newest(self, version: int) -> None:
        """Check that the sender has not begun a newer update, whose bytes may overwrite those of this update."""
        begun = self._control.begun
        if begun != version:
            raise WeightSyncError(
                f"the receiver waits for weight update {version}, but the trainer has already begun update {begun}"
            )

    def _open_update(self, version: int) -> tuple[int, SharedBuffer]:
        """Return the number of the update's first bucket, and its buffer."""
        control = self._control
        first = control[FIRST]
        try:
            buffer = self._attach_latest()
        except WeightSyncError:
            self._check_newest(version)
            raise
        control.fence()
        self._check_newest(version)
        return first, buffer

    def _attach_latest(self) -> SharedBuffer:
        """Return the sender's current buffer, mapped. Raise a `WeightSyncError` if it cannot be opened."""
        serial = self._control[BUFFER]
        latest = next((buffer for buffer in self._buffers if buffer.serial == serial), None)
        if latest is None:
            path = f"/proc/{self._control[PROCESS]}/fd/{self._control[DESCRIPTOR]}"
            try:
                latest = SharedBuffer.attach(self._plan, path, serial)
            except OSError as error:
                raise WeightSyncError(
                    f"rollout replica {self._index} cannot map the memory of training rank 0: {error}. Transport "
                    "'shared_memory' needs both to be processes of one user that see each other in /proc (containers: "
                    "one PID namespace); choose another transport."
                ) from error
        held = {self._control[self._line, word] for word in HOLDS}
        others = (buffer for buffer in self._buffers if buffer.serial in held and buffer is not latest)
        self._buffers = [latest, *others]
        return latest

    def abort(self, version: int) -> None:
        self._control.abort(version)

    def close(self) -> None:
        """Close this side. Held buffers stay."""
        self._control.closed = True
        self._buffers.clear()
