"""Memory for a whole version of the weights, written by one process and read by others of its host."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING

from enginehouse.engines.weights import ParamMeta, TransferPlan, WeightUpdateAborted
from enginehouse.weights.buckets import parameters_of, views
from enginehouse.weights.host_memory import AnonymousMemory, side_by_side
from enginehouse.weights.transports.control_block import ControlBlock
from enginehouse.weights.transports.segment import Segment

if TYPE_CHECKING:
    import torch


class SharedBuffer:
    """A version's parameters, one after the other.

    Args:
        plan: says what they are.
        memory: as large as `bytes_of(plan)`.
        serial: the buffer's number in its session, from 1.

    Attributes:
        offsets: first byte of each parameter, by name.
        path: where processes of this host find it, as long as this object lives.
        descriptor: its file descriptor in this process.
    """

    def __init__(self, plan: TransferPlan, memory: AnonymousMemory, serial: int):
        import torch

        self.serial = serial
        self.offsets, _ = side_by_side(plan.parameters)
        self.path = memory.path
        self.descriptor = memory.descriptor
        self._plan = plan
        self._memory = memory
        self._bytes = torch.frombuffer(memory.memory, dtype=torch.uint8)
        self._views: dict[int, list[tuple[ParamMeta, torch.Tensor]]] = {}

    @staticmethod
    def label(session: str, serial: int) -> str:
        """What the memory of a buffer is called."""
        return f"{Segment.name_of(session)}-{serial}"

    @classmethod
    def create(cls, plan: TransferPlan, serial: int) -> SharedBuffer:
        """Take the memory.

        Raises:
            WeightSyncError: there is not as much.
        """
        _, size = side_by_side(plan.parameters)
        purpose = (
            "for a version of the weights on its way to the rollout replicas, beside those that they hold"
            if serial > 1
            else "for a version of the weights on its way to the rollout replicas, and later for a second"
        )
        return cls(plan, AnonymousMemory.create(cls.label(plan.session, serial), size, purpose), serial)

    @classmethod
    def attach(cls, plan: TransferPlan, path: str, serial: int) -> SharedBuffer:
        """Map what the sender made.

        Raises:
            OSError: it cannot be opened, or something else is there.
        """
        return cls(plan, AnonymousMemory.attach(path, cls.label(plan.session, serial)), serial)

    def views(self, bucket: int) -> list[tuple[ParamMeta, torch.Tensor]]:
        """The parameters of a bucket, each with a tensor that views the buffer."""
        if bucket not in self._views:
            self._views[bucket] = views(parameters_of(self._plan, bucket), self.offsets, self._bytes)
        return self._views[bucket]


class HeldBuffer:
    """A buffer while one update arrives in it, and for as long as it is held: see `HostMemory`.

    Args:
        buffer: where the update arrives.
        version: of the update.
        control: tells the sender.
        line: the receiver's.
        words: those of the line that no other object uses; empty: this one must not be made.
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
        """See `HostMemory`.

        The sender says that an update has begun and then looks who holds what. Here it is the other way round, so that
        one of the two sees the other, whoever comes first.
        """
        if self._held and not self._released:
            return
        self._control[self._at] = self._buffer.serial
        self._control.fence()
        if self._released or self._control.begun != self._version:
            self._control[self._at] = 0
            raise WeightUpdateAborted(f"weight update {self._version} is over: what arrived cannot be held any more")
        self._held = True

    def release(self) -> None:
        """See `HostMemory`."""
        self._released = True
        self._control[self._at] = 0

    def __del__(self) -> None:
        if hasattr(self, "_released"):
            self.release()
            self._words.append(self._at[1])
