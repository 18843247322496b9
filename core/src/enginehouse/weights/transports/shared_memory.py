"""Weights between processes of one host: one sender writes a version once, and all receivers read it where it lies.

Training rank 0 writes each version into a *buffer*, memory as large as the model that no receiver holds. Receivers read
it bucket by bucket as it is written, as tensors that view the buffer. An engine that holds it (`HostMemory`) need not
copy it; the next version is then written into another. So there are mostly two, one served and one being written,
whatever the number of receivers; one, where nobody holds any; and one more whenever all are held.

Buffers have no names, so nothing is left over whoever is killed. What both ends tell each other (`ControlBlock`) lies
in a little shared memory with a name, which is removed once every receiver is attached; before that, Python's resource
tracker removes it.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from enginehouse.engines.weights import ParamMeta, TransferPlan, TransportSession, WeightChunk, WeightSyncError
from enginehouse.weights.buckets import AHEAD, in_plan_order, plan_transfer
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
from enginehouse.weights.transports.ends import IdleSender, Receiver, Sender
from enginehouse.weights.transports.shared_buffer import HeldBuffer, SharedBuffer

if TYPE_CHECKING:
    import torch


class SharedMemoryTransport:
    """Writes weights once into memory that all rollout replicas of the host read."""

    def prepare(
        self, parameters: Sequence[ParamMeta], receivers: int, session: str, bucket_bytes: int, senders: int = 1
    ) -> TransferPlan:
        """See `WeightTransport`."""
        return plan_transfer("shared_memory", parameters, receivers, session, bucket_bytes, senders)

    def connect(self, plan: TransferPlan, side: str, index: int) -> TransportSession:
        """See `WeightTransport`.

        Raises:
            WeightSyncError: not enough memory for a version, or the sender's cannot be opened from this process.
        """
        if side == "send":
            return SharedMemorySender(plan) if index == 0 else IdleSender()
        return SharedMemoryReceiver(plan, index)


class SharedMemorySender(Sender):
    """The end of training rank 0."""

    def __init__(self, plan: TransferPlan):
        self._plan = plan
        self._written = 0  # number of the last bucket written
        self._serial = 0  # of the last buffer made
        self._buffers: list[SharedBuffer] = [self._new_buffer()]
        self._control = control = ControlBlock(plan, create=True)
        control[PROCESS] = os.getpid()
        self._announce(self._buffers[0])

    def _new_buffer(self) -> SharedBuffer:
        buffer = SharedBuffer.create(self._plan, self._serial + 1)
        self._serial += 1
        return buffer

    def _announce(self, buffer: SharedBuffer) -> None:
        """Say where a buffer is."""
        self._control[BUFFER] = buffer.serial
        self._control[DESCRIPTOR] = buffer.descriptor

    def _unheld(self) -> SharedBuffer:
        """A buffer nobody holds, a new one if need be; gives back what is free beside it."""
        held = self._control.held()
        free = [buffer for buffer in self._buffers if buffer.serial not in held] or [self._new_buffer()]
        self._buffers = [buffer for buffer in self._buffers if buffer.serial in held] + free[:1]
        return free[0]

    def _send(self, version: int, source: Iterator[tuple[str, torch.Tensor]], deadline: Deadline) -> dict[str, str]:
        control = self._control
        if version <= control.begun:
            raise WeightSyncError(f"weight update {version} is not newer than {control.begun}, the last one begun")
        control.check(version)
        control[BEGUN] = version  # from here on nobody can come to hold what was written before
        control.fence()
        buffer = self._unheld()
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
            for _, view in buffer.views(bucket):
                parameter, tensor = next(planned)
                tensor = tensor.detach().to("cpu").contiguous()
                sums[parameter.name] = copy_with_checksum(tensor, view)
            control.check(version)
            control.fence()
            control[WRITTEN] = self._written = number
        for _ in planned:  # raises where there is more than was planned
            pass
        self._wait_taken(self._written, first, version, deadline)
        return sums

    def _drop_name(self) -> None:
        """Once nobody needs the control block's name any more, remove it: what has no name cannot be left over."""
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
        """See `TransportSession`."""
        self._control.abort(version)

    def close(self) -> None:
        """See `TransportSession`. A buffer goes with the last receiver that holds it."""
        self._control[CLOSED] = 1
        self._control.segment.unlink()
        self._buffers.clear()


class SharedMemoryReceiver(Receiver):
    """A rollout replica's end."""

    def __init__(self, plan: TransferPlan, index: int):
        self._plan = plan
        self._index = index
        try:
            self._control = ControlBlock(plan, create=False)
        except FileNotFoundError as error:
            raise WeightSyncError(
                f"rollout replica {index} does not see the shared memory of training rank 0. Transport 'shared_memory' "
                "needs both on one host; choose another transport."
            ) from error
        self._line = self._control.line(index)
        self._buffers: list[SharedBuffer] = []  # mapped: the latest, and those held
        self._words = deque(HOLDS)  # of the line, not in use
        self._latest()  # what cannot be opened is better known now than at the first update
        self._control[self._line, ATTACHED] = 1

    def _recv(self, version: int, deadline: Deadline) -> Iterator[WeightChunk]:
        """All chunks of an update have one `memory`; none, where an engine goes on using the objects of more than a few
        updates."""
        control = self._control
        count = len(self._plan.buckets)
        control.wait(
            lambda: control[OPENED] >= version or control.begun > version,
            version,
            deadline,
            lambda: "the trainer did not begin to send",
        )
        self._check_newest(version)
        first, buffer = self._opened(version)
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
            yield WeightChunk([(parameter.name, view) for parameter, view in buffer.views(bucket)], memory=memory)
            control.check(version)
            control.fence()
            self._check_newest(version)
            control[self._line, TAKEN] = number

    def _check_newest(self, version: int) -> None:
        """See that the sender is not at another update: what was read would not be of this one."""
        begun = self._control.begun
        if begun != version:
            raise WeightSyncError(f"weight update {version} was expected, the trainer is already at {begun}")

    def _opened(self, version: int) -> tuple[int, SharedBuffer]:
        """The number of the update's first bucket, and the buffer it arrives in."""
        control = self._control
        first = control[FIRST]
        try:
            buffer = self._latest()
        except WeightSyncError:
            self._check_newest(version)  # then it is no wonder
            raise
        control.fence()
        self._check_newest(version)
        return first, buffer

    def _latest(self) -> SharedBuffer:
        """The buffer the sender writes to, mapped.

        Raises:
            WeightSyncError: it cannot be opened.
        """
        serial = self._control[BUFFER]
        found = next((buffer for buffer in self._buffers if buffer.serial == serial), None)
        if found is None:
            path = f"/proc/{self._control[PROCESS]}/fd/{self._control[DESCRIPTOR]}"
            try:
                found = SharedBuffer.attach(self._plan, path, serial)
            except OSError as error:
                raise WeightSyncError(
                    f"rollout replica {self._index} cannot map the memory of training rank 0: {error}. Transport "
                    "'shared_memory' needs both to be processes of one user that see each other in /proc (containers: "
                    "one PID namespace); choose another transport."
                ) from error
        held = {self._control[self._line, word] for word in HOLDS}
        self._buffers = [found, *(buffer for buffer in self._buffers if buffer.serial in held and buffer is not found)]
        return found

    def abort(self, version: int) -> None:
        """See `TransportSession`."""
        self._control.abort(version)

    def close(self) -> None:
        """See `TransportSession`. What is held stays."""
        self._control.closed = True
        self._buffers.clear()
