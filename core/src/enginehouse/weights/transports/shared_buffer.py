"""Buffers for whole versions of the weights, which training ranks write and other processes of the host read."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from enginehouse.engines.weights import ParamMeta, TransferPlan, WeightSyncError, WeightUpdateAborted
from enginehouse.weights.buckets import parameters_of, view_parameters
from enginehouse.weights.host_memory import AnonymousMemory, lay_out
from enginehouse.weights.transports.control_block import BUFFER, DESCRIPTOR, PROCESS, ControlBlock
from enginehouse.weights.transports.shared_segment import SharedSegment

if TYPE_CHECKING:
    import torch


class SharedBuffer:
    """Memory for a version's parameters, one after the other.

    Args:
        serial: number of the buffer in its session, from 1.

    Attributes:
        offsets: first byte of each parameter, by name.
        path: path by which processes of this host open the buffer, while this object lives.
        descriptor: file descriptor in this process.
    """

    def __init__(self, plan: TransferPlan, memory: AnonymousMemory, serial: int):
        import torch

        self.serial = serial
        self.offsets, _ = lay_out(plan.parameters)
        self.path = memory.path
        self.descriptor = memory.descriptor
        self._plan = plan
        self._memory = memory
        self._bytes = torch.frombuffer(memory.memory, dtype=torch.uint8)
        self._views: dict[int, list[tuple[ParamMeta, torch.Tensor]]] = {}

    @staticmethod
    def label(session: str, serial: int) -> str:
        return f"{SharedSegment.name_of(session)}-{serial}"

    @classmethod
    def create(cls, plan: TransferPlan, serial: int) -> SharedBuffer:
        """Allocate a buffer. Raises `WeightSyncError` if there is not enough memory."""
        _, size = lay_out(plan.parameters)
        extra = "in addition to the versions that replicas hold" if serial > 1 else "and later as much for a second"
        purpose = f"to pass a version of the weights to the rollout replicas, {extra}"
        return cls(plan, AnonymousMemory.create(cls.label(plan.session, serial), size, purpose), serial)

    @classmethod
    def attach(cls, plan: TransferPlan, path: str, serial: int) -> SharedBuffer:
        """Map the sender's buffer. Raises `OSError` if it cannot be opened, or the path leads to other memory."""
        return cls(plan, AnonymousMemory.attach(path, cls.label(plan.session, serial)), serial)

    def view_bucket(self, bucket: int) -> list[tuple[ParamMeta, torch.Tensor]]:
        """Return the parameters of a bucket, each with a tensor that views the buffer."""
        if bucket not in self._views:
            self._views[bucket] = view_parameters(parameters_of(self._plan, bucket), self.offsets, self._bytes)
        return self._views[bucket]


class MappedBuffers:
    """Buffers of training rank 0 that another process has mapped.

    Args:
        where: name of this process in messages.
    """

    def __init__(self, plan: TransferPlan, control: ControlBlock, where: str):
        self._plan = plan
        self._control = control
        self._where = where
        self._buffers: list[SharedBuffer] = []

    def open(self, version: int, kept: Collection[int]) -> SharedBuffer:
        """Return the buffer of the opened update `version`, as `map_latest` does. Raises `WeightSyncError` if a newer
        update has begun, or the buffer cannot be opened."""
        try:
            buffer = self.map_latest(kept)
        except WeightSyncError:
            self._control.check_newest(version)
            raise
        self._control.fence()
        self._control.check_newest(version)
        return buffer

    def map_latest(self, kept: Collection[int]) -> SharedBuffer:
        """Return the current buffer, mapped. Only buffers with the serial numbers `kept` stay mapped beside it.

        Raises:
            WeightSyncError: the buffer cannot be opened.
        """
        serial = self._control[BUFFER]
        latest = next((buffer for buffer in self._buffers if buffer.serial == serial), None)
        if latest is None:
            path = f"/proc/{self._control[PROCESS]}/fd/{self._control[DESCRIPTOR]}"
            try:
                latest = SharedBuffer.attach(self._plan, path, serial)
            except OSError as error:
                raise WeightSyncError(
                    f"{self._where} cannot map the memory of training rank 0: {error}. Transport 'shared_memory' needs "
                    "both to be processes of one user that see each other in /proc (containers: one PID namespace); "
                    "choose another transport."
                ) from error
        others = (buffer for buffer in self._buffers if buffer.serial in kept and buffer is not latest)
        self._buffers = [latest, *others]
        return latest

    def clear(self) -> None:
        self._buffers.clear()


class HeldBuffer:
    """The `HostMemory` of one update's chunks.

    Args:
        control: control block, by which the sender learns that the buffer is held.
        line: line of the receiver in the control block.
        words: unused words of the line, at least one.
    """

    def __init__(self, buffer: SharedBuffer, version: int, control: ControlBlock, line: int, words: deque[int]):
        self.path = buffer.path
        self.offsets: Mapping[str, int] = buffer.offsets
        self._buffer = buffer
        self._version = version
        self._control = control
        self._words = words
        self._at = line, words.popleft()
        self._held = False
        self._released = False

    def hold(self) -> None:
        """Hold the buffer; see `HostMemory`.

        The sender writes that an update has begun, and then reads which buffers are held. This method writes that the
        buffer is held, and then reads which update has begun. So at least one of them sees what the other wrote.
        """
        if self._held and not self._released:
            return
        self._control[self._at] = self._buffer.serial
        self._control.fence()
        if self._released or self._control.begun != self._version:
            self._control[self._at] = 0
            raise WeightUpdateAborted(f"weight update {self._version} is over, so its memory cannot be held any more")
        self._held = True

    def release(self) -> None:
        self._released = True
        self._control[self._at] = 0

    def __del__(self) -> None:
        if hasattr(self, "_released"):
            self.release()
            self._words.append(self._at[1])
