"""Sends weights from each training rank that holds a part straight to the replicas that need it, on any hosts.

The moves are planned from metadata (`plan_reshard`), so nothing is gathered: a rank sends slices of its own parts, and
a replica assembles whole parameters from the slices, bucket by bucket. A rank and a replica that it sends to have two
TCP connections: one for messages (`ControlChannel`), one for bytes (`PartSender`, `PartReceiver`).

A replica has room for two buckets. A rank sends parts of bucket k + 2 once all its replicas have taken bucket k. So a
replica can always read all bytes that were sent. After a failed update, the next update can begin at once, because
late bytes of the older update are read and dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from enginehouse.engines.weights import ParamMeta, TransferPlan, TransportSession, WeightChunk
from enginehouse.weights.buckets import AHEAD, check_announced, plan_transfer, view_parameters
from enginehouse.weights.checksums import checksum
from enginehouse.weights.host_memory import lay_out
from enginehouse.weights.parts import Region, held_by, part_name, parts_of, shape_of
from enginehouse.weights.transports.barrier import Barrier
from enginehouse.weights.transports.deadline import Deadline
from enginehouse.weights.transports.ends import IdleSender, Receiver, Sender
from enginehouse.weights.transports.rendezvous import Rendezvous, join, join_stream
from enginehouse_transports.resharding import Move, ReshardPlan, index_within, plan_reshard
from enginehouse_transports.streams import HEADING_BYTES, WHOLE, Heading, PartReceiver, PartSender

if TYPE_CHECKING:
    import torch

    from enginehouse.weights.transports.control_channel import ControlChannel


class PointToPointTransport:
    """Sends each part of a parameter from one training rank that holds it to each rollout replica.

    Attributes:
        name: name of the transport in its plans.
        plans_bytes: True if each update moves the same number of bytes, which a plan can tell.
    """

    name = "point_to_point"
    plans_bytes = True

    def prepare(
        self,
        parameters: Sequence[ParamMeta],
        receivers: int,
        session: str,
        bucket_bytes: int,
        senders: int = 1,
        targets: Sequence[ParamMeta] = (),
    ) -> TransferPlan:
        """Plan a transfer; see `WeightTransport`.

        Args:
            targets: the parameters in the receivers' layout; empty if receivers hold whole parameters.
        """
        plan = plan_transfer(self.name, parameters, receivers, session, bucket_bytes, senders)
        plan = replace(plan, targets=tuple(targets))
        reshard = plan_moves(plan)  # also checks the layouts
        if not self.plans_bytes:
            return plan
        bytes_moved = reshard.bytes_moved + HEADING_BYTES * len(reshard)
        return replace(plan, bytes_moved=bytes_moved, bytes_minimum=reshard.bytes_minimum)

    def connect(self, plan: TransferPlan, side: str, index: int) -> TransportSession:
        """Open one side of the connection; see `WeightTransport`.

        Raises:
            WeightSyncError: a training rank cannot be reached at its address, or belongs to another run.
        """
        if side == "recv":
            return PointToPointReceiver(plan, index)
        return PointToPointSender(plan, index) if index < plan.senders else IdlePart()


def plan_moves(plan: TransferPlan) -> ReshardPlan:
    """Plan the moves of a transfer; every side computes the same plan."""
    return plan_reshard(plan.parameters, targets_of(plan), plan.senders, plan.receivers)


def targets_of(plan: TransferPlan) -> Sequence[ParamMeta]:
    """Return the parameters in the receivers' layout."""
    return plan.targets or [
        ParamMeta(parameter.name, parameter.dtype, parameter.shape) for parameter in plan.parameters
    ]


def bucket_of_each(plan: TransferPlan) -> dict[int, int]:
    """Return each parameter's bucket, by the parameter's index."""
    return {index: number for number, bucket in enumerate(plan.buckets) for index in bucket}


class IdlePart(IdleSender):
    """The sending side at a training rank from which the plan sends nothing."""

    sends_parts = True


class PointToPointSender(Sender):
    """The sending side, at a training rank. If several ranks hold a part, only the rank that the plan names sends it.

    Attributes:
        port: port to which receivers connect.
        sends_parts: see `PartsSession`.
    """

    sends_parts = True

    def __init__(self, plan: TransferPlan, rank: int):
        self._plan = plan
        self._bucket_of = bucket_of_each(plan)
        self._parts = parts_of(plan.parameters, rank)
        names = {parameter.name: index for index, parameter in enumerate(plan.parameters)}
        self._moves: list[tuple[int, list[tuple[int, Move]]]] = []  # for each part: parameter, numbered moves
        moves: dict[int, list[tuple[int, Move]]] = {}
        for number, move in plan_moves(plan).moves_from(rank).items():
            moves.setdefault(move.parameter, []).append((number, move))
        for parameter, _ in self._parts:
            index = names[parameter.name]
            self._moves.append((index, moves.get(index, [])))
        self._barrier = Barrier()
        receivers = {move.target for own in moves.values() for _, move in own}
        self._rendezvous = Rendezvous(self._barrier, plan, receivers, self._on_message, streams=True)
        self._part_senders: dict[int, PartSender] = {}
        self._taken = 0  # number of buckets of the current update that every receiver has taken
        self.port: int = self._rendezvous.port

    def _on_message(self, index: int, message: dict[str, Any]) -> None:
        """Ignore a message: `Rendezvous` handles all messages that receivers send."""

    def _send(self, version: int, source: Iterator[tuple[str, torch.Tensor]], deadline: Deadline) -> dict[str, str]:
        barrier, rendezvous = self._barrier, self._rendezvous
        rendezvous.begin(version, deadline)
        self._taken = 0
        for index, stream in rendezvous.streams.items():
            if index not in self._part_senders:
                self._part_senders[index] = PartSender(stream, barrier, lambda index=index: rendezvous.lost(index))  # type: ignore[misc]
        with barrier.changed:
            barrier.check(version)
            rendezvous.send_all({"version": version})
        sums: dict[str, str] = {}
        announced = check_announced(((each, shape_of(region)) for each, region in self._parts), source)
        for (parameter, part), (index, moves) in zip(self._parts, self._moves, strict=True):
            bucket = self._bucket_of[index]
            self._wait_taken(version, bucket - AHEAD + 1, deadline)  # before the next is gathered
            _, tensor = next(announced)
            leaving: dict[Region, tuple[int, torch.Tensor]] = {}
            for number, move in moves:
                if move.region not in leaving:
                    piece = tensor.detach()[index_within(move.region, part)].to("cpu").contiguous()
                    name = part_name(parameter, move.region)
                    leaving[move.region] = self._pack(name, piece)
                    sums[name] = checksum(piece)
                base, packed = leaving[move.region]
                heading = Heading(version, bucket, number, packed.nbytes, base)
                self._part_senders[move.target].put(heading, packed)
        for _ in announced:  # raises if there is more than was planned
            pass
        self._wait_taken(version, len(self._plan.buckets), deadline)
        return sums

    def _pack(self, name: str, piece: torch.Tensor) -> tuple[int, torch.Tensor]:
        """Return what to send of a piece, contiguous in host memory, and the version whose bytes it changes."""
        return WHOLE, piece

    def _wait_taken(self, version: int, buckets: int, deadline: Deadline) -> None:
        """Wait until every receiver has taken this many buckets, one bucket after the other."""
        rendezvous = self._rendezvous
        with self._barrier.changed:
            self._barrier.check(version)
            while self._taken < buckets:
                number = self._taken + 1
                self._barrier.wait(
                    lambda number=number: not rendezvous.behind(version, number),  # type: ignore[misc]
                    version,
                    deadline,
                    lambda number=number: rendezvous.missing(version, number),  # type: ignore[misc]
                )
                self._taken = number

    def abort(self, version: int) -> None:
        """Abort an update; see `TransportSession`."""
        with self._barrier.changed:
            self._rendezvous.abort(version)

    def close(self) -> None:
        """Close this side."""
        self._rendezvous.close()
        for sender in self._part_senders.values():
            sender.close()


class Arrival:
    """An update as it arrives at a receiver.

    Attributes:
        begun: ranks that have begun to send the update.
        buckets: for each bucket, its tensors by name, which all share the memory of `AHEAD` buckets.
        left: for each bucket, the number of moves that have not arrived.
        taken: number of buckets that the replica has taken.
    """

    def __init__(self, version: int, buckets: Sequence[dict[str, torch.Tensor]], left: Sequence[int]):
        self.version = version
        self.begun: set[int] = set()
        self.buckets = buckets
        self.left = list(left)
        self.taken = 0

    @property
    def whole(self) -> bool:
        """True if everything has arrived."""
        return not any(self.left)


class PointToPointReceiver(Receiver):
    """The receiving side, at a rollout replica."""

    def __init__(self, plan: TransferPlan, index: int):
        self._plan = plan
        self._barrier = Barrier()
        targets = targets_of(plan)
        bucket_of = bucket_of_each(plan)
        self._held: dict[int, Region] = {}  # this replica's part of each parameter, by the parameter's index
        for number, target in enumerate(targets):
            region = held_by(target, index)
            if region is not None:
                self._held[number] = region
        self._moves = plan_moves(plan).moves_to(index)
        self._moves_in: list[list[int]] = [[] for _ in plan.buckets]
        for number, move in self._moves.items():
            self._moves_in[bucket_of[move.parameter]].append(number)
        self._noted: dict[int, int] = {}  # by rank: newest version that this replica took, and the rank knows it
        self._arrival: Arrival | None = None
        self._channels: dict[int, ControlChannel] = {}
        self._part_receivers: list[PartReceiver] = []
        try:
            for rank in sorted({move.source for move in self._moves.values()}):
                self._join(rank, index)
        except BaseException:
            self.close()
            raise

    def _join(self, rank: int, index: int) -> None:
        reason = f"training rank {rank} is gone, or closed the connection"
        channel, aborted = join(self._plan, index, rank)
        self._channels[rank] = channel
        self._noted[rank] = -1
        stream = join_stream(self._plan, index, rank)
        self._part_receivers.append(
            PartReceiver(
                stream,
                lambda heading: self._find_room(rank, heading),
                self._note_arrival,
                lambda: self._barrier.close(reason),
            )
        )
        with self._barrier.changed:
            self._barrier.abort(aborted)
        channel.listen(lambda message: self._on_message(rank, message), lambda: self._barrier.close(reason))

    def _on_message(self, rank: int, message: dict[str, Any]) -> None:
        with self._barrier.changed:
            if "aborted" in message:
                if not self._barrier.broken:  # else `recv` says why it is broken
                    self.abort(message["aborted"])  # tells the other ranks, which know only the replicas
            elif "noted" in message:
                self._noted[rank] = message["noted"]
            else:
                self._begin(rank, message["version"])
            self._barrier.changed.notify_all()

    def _begin(self, rank: int, version: int) -> Arrival | None:
        """Record that a rank has begun an update, and return its arrival; None if a newer update has begun. The caller
        holds `changed`."""
        if version > self._barrier.begun:
            self._arrival = self._expect(version, self._arrival)
            self._barrier.begun = version
        if version < self._barrier.begun or self._arrival is None:
            return None
        self._arrival.begun.add(rank)
        return self._arrival

    def _expect(self, version: int, before: Arrival | None) -> Arrival:
        """Return the arrival of an update that begins after the update `before`. The caller holds `changed`."""
        # Late bytes of a failed update may still arrive in its buckets.
        buckets = before.buckets if before is not None and before.whole else self._make_buckets()
        return Arrival(version, buckets, [len(moves) for moves in self._moves_in])

    def _make_buckets(self) -> list[dict[str, torch.Tensor]]:
        """Allocate room for `AHEAD` buckets, and return each bucket's tensors in it."""
        import torch

        layouts = [self._lay_out_bucket(bucket) for bucket in range(len(self._plan.buckets))]
        largest = max((size for _, _, size in layouts), default=0)
        slots = [torch.empty(largest, dtype=torch.uint8) for _ in range(AHEAD)]
        return [
            {part.name: tensor for part, tensor in view_parameters(parts, offsets, slots[bucket % AHEAD])}
            for bucket, (parts, offsets, _) in enumerate(layouts)
        ]

    def _lay_out_bucket(self, bucket: int) -> tuple[list[ParamMeta], dict[str, int], int]:
        """Return this replica's parts of a bucket as parameters, the first byte of each, and their size in bytes."""
        parts = [
            replace(self._plan.parameters[index], shape=shape_of(self._held[index]))
            for index in self._plan.buckets[bucket]
            if index in self._held
        ]
        offsets, size = lay_out(parts)
        return parts, dict(offsets), size

    def _find_room(self, rank: int, heading: Heading) -> torch.Tensor | None:
        """Return the tensor for the next bytes; None if they belong to an older update."""
        move = self._moves.get(heading.move)
        if move is None or move.source != rank or not self._fits(heading, move):
            raise ValueError(f"training rank {rank} sent a part that the plan does not have: {heading}")
        with self._barrier.changed:
            arrival = self._begin(rank, heading.version)
        return None if arrival is None else self._place(heading, move, arrival)

    def _fits(self, heading: Heading, move: Move) -> bool:
        """Return True if the bytes behind a heading can be those of a move."""
        return (heading.nbytes, heading.base) == (move.nbytes, WHOLE)

    def _place(self, heading: Heading, move: Move, arrival: Arrival) -> torch.Tensor | None:
        """Return the tensor for the bytes behind a heading; None to drop them."""
        return self._view(move, arrival.buckets[heading.bucket])

    def _view(self, move: Move, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the part of a bucket's tensors that a move brings."""
        tensor = tensors[self._plan.parameters[move.parameter].name]
        return tensor[index_within(move.region, self._held[move.parameter])]

    def _note_arrival(self, heading: Heading, content: torch.Tensor) -> None:
        """Record that `content` has the bytes behind a heading."""
        with self._barrier.changed:
            if self._arrival is not None and self._arrival.version == heading.version:
                self._arrival.left[heading.bucket] -= 1
                self._barrier.changed.notify_all()

    def _recv(self, version: int, deadline: Deadline) -> Iterator[WeightChunk]:
        count = len(self._plan.buckets)
        for bucket in range(count):
            tensors = self._await_bucket(version, bucket, deadline)
            yield WeightChunk(list(tensors.items()), parts=self._find_parts(bucket, tensors))
            with self._barrier.changed:
                self._barrier.check_newest(version)
                if self._arrival is not None:
                    self._arrival.taken = bucket + 1
                self._send_all({"version": version, "taken": bucket + 1})
        with self._barrier.changed:  # all that a sender said before its note has arrived, so no abort is missed
            self._barrier.check_newest(version)

            def silent() -> list[str]:
                return [str(rank) for rank, noted in self._noted.items() if noted < version]

            if count:
                self._barrier.wait(
                    lambda: not silent(),
                    version,
                    deadline,
                    lambda: f"training rank {', '.join(silent())} did not confirm the last bucket",
                )

    def _await_bucket(self, version: int, bucket: int, deadline: Deadline) -> dict[str, torch.Tensor]:
        """Wait until a bucket has arrived, and return its tensors."""
        barrier = self._barrier

        def ready() -> bool:
            arrival = self._arrival
            if barrier.begun > version or not self._channels:
                return True
            current = arrival is not None and arrival.version == version
            return current and arrival.begun >= set(self._channels) and not arrival.left[bucket]  # type: ignore[union-attr]

        def missing() -> str:
            begun = self._arrival.begun if self._arrival is not None and barrier.begun == version else set()
            absent = ", ".join(str(rank) for rank in self._channels if rank not in begun)
            if absent:
                return f"training rank {absent} did not begin to send"
            return f"bucket {bucket + 1} of {len(self._plan.buckets)} did not arrive"

        with barrier.changed:
            self._barrier.check_newest(version)
            barrier.wait(ready, version, deadline, missing)
            self._barrier.check_newest(version)
            return (self._arrival.buckets if self._arrival is not None else self._make_buckets())[bucket]

    def _find_parts(self, bucket: int, tensors: dict[str, torch.Tensor]) -> dict[str, list[tuple[str, torch.Tensor]]]:
        """Return, for parameters of a bucket that come in parts, the parts' names and tensors."""
        parts: dict[str, list[tuple[str, torch.Tensor]]] = {name: [] for name in tensors}
        for number in self._moves_in[bucket]:
            move = self._moves[number]
            parameter = self._plan.parameters[move.parameter]
            parts[parameter.name].append((part_name(parameter, move.region), self._view(move, tensors)))
        return {name: pieces for name, pieces in parts.items() if [piece for piece, _ in pieces] != [name]}

    def _send_all(self, message: dict[str, Any]) -> None:
        for channel in self._channels.values():
            channel.send(message)

    def abort(self, version: int) -> None:
        """Abort an update; see `TransportSession`."""
        with self._barrier.changed:
            if version > self._barrier.aborted:
                self._barrier.abort(version)
                self._send_all({"aborted": version})

    def close(self) -> None:
        """Close this side."""
        self._barrier.close()
        for channel in self._channels.values():
            channel.close()
        for receiver in self._part_receivers:
            receiver.close()
