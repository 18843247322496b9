"""Sends only the elements that changed since the last update, for slow links between hosts.

Everything else is as in `point_to_point`. A training rank keeps each part as it sent it last, in host memory, and
compares bits. If a part's changes are less than half of its bytes, the rank sends them, and names the version that
they change; else it sends the part. The first update of a connection and each update after a failed one is sent whole.

A replica assembles each version in memory of a whole model. An engine may hold that memory; then the next version is
assembled in other memory, and otherwise in place. Changes are set, not added. So the comparison of checksums, which
are those of whole parts on both sides, finds changes that were lost, or were made to other bytes. A replica refuses
changes of a version that it does not have complete.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from enginehouse.engines.weights import (
    DTYPE_BYTES,
    ParamMeta,
    TransferPlan,
    TransportSession,
    WeightChunk,
    WeightSyncError,
    WeightUpdateAborted,
)
from enginehouse.weights.buckets import view_parameters
from enginehouse.weights.host_memory import AnonymousMemory, lay_out
from enginehouse.weights.transports.barrier import Barrier
from enginehouse.weights.transports.deadline import Deadline
from enginehouse_transports.point_to_point import (
    Arrival,
    IdlePart,
    PointToPointReceiver,
    PointToPointSender,
    PointToPointTransport,
)
from enginehouse_transports.resharding import Move
from enginehouse_transports.streams import HEADING_BYTES, WHOLE, Heading

if TYPE_CHECKING:
    import torch

FARTHEST = 256
"""Largest distance of two sent elements, which one byte tells: each element at a multiple of it is sent, changed or
not."""


class DifferencesTransport(PointToPointTransport):
    """Sends each part of a parameter from one training rank to each rollout replica, and later only its changes."""

    name = "differences"
    plans_bytes = False

    def connect(self, plan: TransferPlan, side: str, index: int) -> TransportSession:
        """Open one side of the connection; see `PointToPointTransport`."""
        if side == "recv":
            return DifferencesReceiver(plan, index)
        return DifferencesSender(plan, index) if index < plan.senders else IdlePart()


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor whose elements are equal if their bits are."""
    import torch

    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])


def find_changes(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor | None:
    """Return the changes from one contiguous tensor to another of the same shape and dtype, for `make_changes`.

    Returns:
        Bytes (uint8): the new values of the elements that changed, and of each `FARTHEST`-th element; then for each
        value one byte, the number of elements between it and the value before. None if these are at least half of the
        tensor's bytes.
    """
    import torch

    before, after = as_integers(old).view(-1), as_integers(new).view(-1)
    chosen = before != after
    chosen[FARTHEST - 1 :: FARTHEST] = True
    if 2 * int(chosen.count_nonzero()) * (new.itemsize + 1) >= new.nbytes:
        return None
    places = chosen.nonzero().view(-1)
    skipped = places.diff(prepend=places.new_tensor([-1])) - 1
    return torch.cat([after[places].view(torch.uint8), skipped.to(torch.uint8)])


def make_changes(changes: torch.Tensor, target: torch.Tensor) -> None:
    """Make the changes of `find_changes` to a tensor that has the old values, contiguous or not.

    Raises:
        IndexError: a change lies beyond the tensor.
    """
    import torch

    count = len(changes) // (target.itemsize + 1)
    values, skipped = changes.split([count * target.itemsize, count])
    places = (skipped.to(torch.int64) + 1).cumsum(0) - 1
    bits = as_integers(target)
    bits.put_(places, values.view(bits.dtype))


class DifferencesSender(PointToPointSender):
    """The sending side, at a training rank, with a copy of each part that it sends."""

    def __init__(self, plan: TransferPlan, rank: int):
        self._kept: dict[str, torch.Tensor] = {}  # parts as they were sent last, by `part_name`
        self._complete = WHOLE  # version of `_kept`, if all replicas took it
        self._base = WHOLE  # version that the update in progress changes
        super().__init__(plan, rank)

    def _send(self, version: int, source: Iterator[tuple[str, torch.Tensor]], deadline: Deadline) -> dict[str, str]:
        self._base = self._complete if self._complete > self._barrier.aborted else WHOLE
        self._complete = WHOLE  # until all replicas have what is kept from now on
        sums = super()._send(version, source, deadline)
        self._complete = version
        return sums

    def _pack(self, name: str, piece: torch.Tensor) -> tuple[int, torch.Tensor]:
        kept = self._kept.get(name)
        if kept is None:
            self._kept[name] = piece.clone()
            return WHOLE, piece
        changes = find_changes(kept, piece) if self._base != WHOLE else None
        kept.copy_(piece)
        return (WHOLE, piece) if changes is None else (self._base, changes)


class Area:
    """Memory for a replica's parts of all parameters.

    Attributes:
        buckets: for each bucket, its tensors by name.
        offsets: first byte of each parameter, by name.
        memory: the memory of the tensors.
        lent: the area's `HostMemory` of each update, while it exists.
    """

    def __init__(self, buckets: Sequence[Sequence[ParamMeta]]):
        import torch

        self.offsets, size = lay_out([part for parts in buckets for part in parts])
        self.memory = AnonymousMemory.create("enginehouse-differences", size, "to assemble a version of the weights")
        content = torch.frombuffer(self.memory.memory, dtype=torch.uint8)
        self.buckets = [
            {part.name: tensor for part, tensor in view_parameters(parts, self.offsets, content)} for parts in buckets
        ]
        self.lent: weakref.WeakSet[LentArea] = weakref.WeakSet()

    @property
    def is_held(self) -> bool:
        """True if an engine holds the memory."""
        return any(lent.is_held for lent in self.lent)


class LentArea:
    """The `HostMemory` of one update's chunks.

    Attributes:
        is_held: True between `hold` and `release`.
    """

    def __init__(self, area: Area, version: int, barrier: Barrier):
        self.path = area.memory.path
        self.offsets: Mapping[str, int] = area.offsets
        self.is_held = False
        self._area = area
        self._version = version
        self._barrier = barrier
        self._released = False
        area.lent.add(self)

    def hold(self) -> None:
        """Hold the memory; see `HostMemory`."""
        with self._barrier.changed:  # so that no update chooses its memory at the same time
            if self.is_held:
                return
            if self._released or self._barrier.begun != self._version:
                raise WeightUpdateAborted(
                    f"weight update {self._version} is over, so its memory cannot be held any more"
                )
            self.is_held = True

    def release(self) -> None:
        """Release the memory; see `HostMemory`."""
        with self._barrier.changed:
            self._released, self.is_held = True, False


class AreaArrival(Arrival):
    """An update as it arrives in an `Area`.

    Attributes:
        area: memory of the new version.
        base: the version that can be changed to the new one; `WHOLE` if there is none.
        unchanged: for each bucket, the tensors of `base`; those of `area` if they are changed in place.
    """

    def __init__(
        self, version: int, area: Area, left: Sequence[int], base: int, unchanged: Sequence[dict[str, torch.Tensor]]
    ):
        super().__init__(version, area.buckets, left)
        self.area, self.base, self.unchanged = area, base, unchanged


class DifferencesReceiver(PointToPointReceiver):
    """The receiving side, at a rollout replica.

    A place in memory is written by one rank alone, in the order in which the rank sends. So late bytes of a failed
    update are never written over those of a later update, although both may use the same memory.

    Attributes:
        bytes_arrived: see `CountingSession`.
    """

    _arrival: AreaArrival | None

    def __init__(self, plan: TransferPlan, index: int):
        self.bytes_arrived = 0
        self._index = index
        self._areas: list[Area] = []  # that of the newest update, then those that are held
        self._refused: tuple[int, WeightSyncError] | None = None  # the last refused update, and the reason
        super().__init__(plan, index)

    def _expect(self, version: int, before: Arrival | None) -> Arrival:
        self.bytes_arrived = 0
        left = [len(moves) for moves in self._moves_in]
        area = next((area for area in self._areas if not area.is_held), None)
        if area is None:
            try:
                area = Area([self._lay_out_bucket(bucket)[0] for bucket in range(len(self._plan.buckets))])
            except WeightSyncError as error:
                self._refuse(version, error)
                return Arrival(version, [], left)
        self._areas = [area, *(other for other in self._areas if other is not area and other.is_held)]
        is_complete = before is not None and before.taken == len(self._plan.buckets)
        base, unchanged = (before.version, before.buckets) if before is not None and is_complete else (WHOLE, ())
        return AreaArrival(version, area, left, base, unchanged)

    def _refuse(self, version: int, error: WeightSyncError) -> None:
        """Fail an update with an error of this side."""
        self._refused = version, error
        self.abort(version)

    def _fits(self, heading: Heading, move: Move) -> bool:
        if heading.base == WHOLE:
            return super()._fits(heading, move)
        each = DTYPE_BYTES[self._plan.parameters[move.parameter].dtype] + 1
        return heading.nbytes % each == 0 and 2 * heading.nbytes < move.nbytes

    def _place(self, heading: Heading, move: Move, arrival: Arrival) -> torch.Tensor | None:
        import torch

        if self._barrier.aborted >= arrival.version or not isinstance(arrival, AreaArrival):
            return None
        if heading.base == WHOLE:
            return super()._place(heading, move, arrival)
        if heading.base != arrival.base:
            present = "no complete version" if arrival.base == WHOLE else f"version {arrival.base}"
            error = f"was sent what changed since version {heading.base} of the weights, but has {present} to change"
            self._refuse(arrival.version, WeightSyncError(f"rollout replica {self._index} {error}"))
            return None
        return torch.empty(heading.nbytes, dtype=torch.uint8)

    def _note_arrival(self, heading: Heading, content: torch.Tensor) -> None:
        with self._barrier.changed:
            arrival = self._arrival
            if arrival is None or arrival.version != heading.version:
                return
            self.bytes_arrived += HEADING_BYTES + heading.nbytes
        if heading.base != WHOLE:
            move = self._moves[heading.move]
            target = self._view(move, arrival.buckets[heading.bucket])
            if arrival.unchanged is not arrival.buckets:
                target.copy_(self._view(move, arrival.unchanged[heading.bucket]))
            make_changes(content, target)
        super()._note_arrival(heading, content)

    def _recv(self, version: int, deadline: Deadline) -> Iterator[WeightChunk]:
        memory: LentArea | None = None
        try:
            for chunk in super()._recv(version, deadline):
                with self._barrier.changed:
                    self._barrier.check_newest(version)
                    if memory is None and self._arrival is not None:
                        memory = LentArea(self._arrival.area, version, self._barrier)
                yield replace(chunk, memory=memory)
        except WeightUpdateAborted as error:
            if self._refused is not None and self._refused[0] == version:
                raise self._refused[1] from error
            raise
