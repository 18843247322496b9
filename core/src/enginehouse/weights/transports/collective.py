"""Weights from training rank 0 to any number of rollout replicas, on any hosts: broadcast through a group of their own.

Two things connect the ends. The weights travel, bucket by bucket, in collectives of a `BroadcastGroup`. Messages about
them travel over a TCP connection from each replica to rank 0 (`ControlChannel`): the trainer begins a version, a
replica has taken so many buckets, a version is aborted; and that an end died is known from its broken connection.

A replica takes part in the broadcasts of two buckets before it has taken any, and in that of bucket k + 2 once it has
taken bucket k. The sender begins none that a replica would not take part in, so whatever is on its way ends, unless a
process dies, or stands still until the deadline. After an update that failed the group is given up: nobody has to
know how far the others came.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from enginehouse.engines.weights import (
    ALIGNMENT,
    ParamMeta,
    TransferPlan,
    TransportSession,
    WeightChunk,
    WeightSyncError,
    WeightUpdateAborted,
)
from enginehouse.errors import first_line
from enginehouse.weights.buckets import AHEAD, in_plan_order, parameters_of, plan_transfer, views
from enginehouse.weights.checksums import copy_with_checksum
from enginehouse.weights.host_memory import side_by_side
from enginehouse.weights.transports.barrier import Barrier
from enginehouse.weights.transports.broadcast_group import BroadcastGroup, head, heading, room
from enginehouse.weights.transports.deadline import Deadline
from enginehouse.weights.transports.ends import IdleSender, Receiver, Sender
from enginehouse.weights.transports.rendezvous import Rendezvous, join
from enginehouse.weights.transports.store import Store

if TYPE_CHECKING:
    import torch

ENDING_SECONDS = 1.0
"""How long `close` waits for a group's thread. One that another rank keeps longer ends by itself."""


class CollectiveTransport:
    """Broadcasts weights to rollout replicas on any hosts, through `torch.distributed`."""

    def prepare(
        self, parameters: Sequence[ParamMeta], receivers: int, session: str, bucket_bytes: int, senders: int = 1
    ) -> TransferPlan:
        """See `WeightTransport`."""
        return plan_transfer("collective", parameters, receivers, session, bucket_bytes, senders)

    def connect(self, plan: TransferPlan, side: str, index: int) -> TransportSession:
        """See `WeightTransport`.

        Raises:
            WeightSyncError: the sender cannot be reached at its address, or is another run's.
        """
        if side == "send":
            return CollectiveSender(plan) if index == 0 else IdleSender()
        return CollectiveReceiver(plan, index)


def bucket_nbytes(plan: TransferPlan, bucket: int) -> int:
    """Bytes of a bucket on its way, with its heading."""
    return room(sum(plan.parameters[index].aligned_nbytes for index in plan.buckets[bucket]))


def tensors(plan: TransferPlan, bucket: int, buffer: torch.Tensor) -> list[tuple[ParamMeta, torch.Tensor]]:
    """The parameters of a bucket as tensors that view a buffer, behind its heading."""
    parameters = parameters_of(plan, bucket)
    return views(parameters, side_by_side(parameters)[0], buffer[ALIGNMENT:])


class CollectiveSender(Sender):
    """The end of training rank 0.

    Attributes:
        port: where receivers connect.
    """

    def __init__(self, plan: TransferPlan):
        self._plan = plan
        self._barrier = Barrier()
        self._store = Store(self._barrier, self._pass_on)
        self._group: BroadcastGroup | None = None
        self._groups = 0
        self._rendezvous = Rendezvous(self._barrier, plan, range(plan.receivers), self._on_message)
        self.port: int = self._rendezvous.port

    def _on_message(self, index: int, message: dict[str, Any]) -> None:
        self._store.put(message["note"], bytes.fromhex(message["value"]))
        self._rendezvous.send_all(message)

    def _pass_on(self, name: str, value: bytes) -> None:
        self._rendezvous.send_all({"note": name, "value": value.hex()})

    def _send(self, version: int, source: Iterator[tuple[str, torch.Tensor]], deadline: Deadline) -> dict[str, str]:
        self._rendezvous.begin(version, deadline)
        if not self._plan.buckets:
            return self._send_nothing(version, source, deadline)
        group = self._group = self._group or self._new_group(deadline)
        try:
            return self._send_by(group, version, source, deadline)
        except BaseException:
            self._group = None
            group.leave()
            raise

    def _send_by(
        self, group: BroadcastGroup, version: int, source: Iterator[tuple[str, torch.Tensor]], deadline: Deadline
    ) -> dict[str, str]:
        self._begin(version, group.number, deadline)
        sums: dict[str, str] = {}
        moving: list[Future[None]] = []
        planned = in_plan_order(self._plan, source)
        for bucket in range(len(self._plan.buckets)):
            slot = bucket % AHEAD
            self._wait_taken(moving[: max(0, bucket - AHEAD + 1)], version, deadline)
            head(group.buffers[slot], version, bucket)
            for _, view in tensors(self._plan, bucket, group.buffers[slot]):
                parameter, tensor = next(planned)
                sums[parameter.name] = copy_with_checksum(tensor.detach().to("cpu").contiguous(), view)
            moving.append(group.broadcast(slot, bucket_nbytes(self._plan, bucket), deadline))
            moving[-1].add_done_callback(self._wake)
        for _ in planned:  # raises where there is more than was planned
            pass
        self._wait_taken(moving, version, deadline)
        return sums

    def _send_nothing(
        self, version: int, source: Iterator[tuple[str, torch.Tensor]], deadline: Deadline
    ) -> dict[str, str]:
        self._begin(version, 0, deadline)
        for _ in in_plan_order(self._plan, source):
            pass
        return {}

    def _begin(self, version: int, group: int, deadline: Deadline) -> None:
        with self._barrier.changed:
            self._barrier.check(version)
            self._rendezvous.send_all({"version": version, "group": group, "seconds": deadline.left})

    def _new_group(self, deadline: Deadline) -> BroadcastGroup:
        self._groups += 1
        size, nbytes = 1 + self._plan.receivers, room(self._plan.bucket_bytes)
        own_host = next(iter(self._rendezvous.channels.values())).own_host  # as the receivers know it
        return BroadcastGroup(self._store, own_host, 0, size, self._groups, nbytes, deadline)

    def _wake(self, moved: Future[None]) -> None:
        with self._barrier.changed:
            self._barrier.changed.notify_all()

    def _wait_taken(self, moved: list[Future[None]], version: int, deadline: Deadline) -> None:
        """Wait until every receiver has taken the first buckets, whose broadcasts are given."""
        rendezvous, count = self._rendezvous, len(moved)

        def missing() -> str:
            return rendezvous.missing(version, count)

        with self._barrier.changed:
            for last in moved[-1:]:  # they end in order, and what follows a failure fails
                await_moved(self._barrier, last, version, deadline, missing)
            self._barrier.wait(lambda: not (count and rendezvous.behind(version, count)), version, deadline, missing)

    def abort(self, version: int) -> None:
        """See `TransportSession`."""
        with self._barrier.changed:
            self._rendezvous.abort(version)

    def close(self) -> None:
        """See `TransportSession`."""
        self._rendezvous.close()
        if self._group is not None:
            self._group.leave()
            self._group.ended(ENDING_SECONDS)


class CollectiveReceiver(Receiver):
    """A rollout replica's end."""

    def __init__(self, plan: TransferPlan, index: int):
        self._plan = plan
        self._index = index
        self._barrier = Barrier()
        self._store = Store(self._barrier, lambda name, value: self._channel.send({"note": name, "value": value.hex()}))
        self._noted = -1  # newest version of which the sender knows that it was taken here
        self._group: BroadcastGroup | None = None
        self._arriving: list[Future[None]] = []  # the buckets of the newest update, those to come included
        self._limit = Deadline(0.0)  # of the newest update
        channel, self._barrier.aborted = join(plan, index, 0)
        self._channel = channel
        channel.listen(
            self._on_message, lambda: self._barrier.close("training rank 0 is gone, or closed the connection")
        )

    def _on_message(self, message: dict[str, Any]) -> None:
        with self._barrier.changed:
            if self._barrier.broken:
                return
            if "aborted" in message:
                self._barrier.abort(message["aborted"])
            elif "note" in message:
                self._store.put(message["note"], bytes.fromhex(message["value"]))
            elif "noted" in message:
                self._noted = message["noted"]
                self._barrier.changed.notify_all()
            else:
                self._begin(**message)

    def _begin(self, version: int, group: int, seconds: float) -> None:
        """Take part in an update's first broadcasts, even if it was aborted here: the sender may have begun them."""
        self._limit = Deadline(seconds)
        if group and (self._group is None or self._group.number != group):
            if self._group is not None:
                self._group.leave()
            rank, size, nbytes = 1 + self._index, 1 + self._plan.receivers, room(self._plan.bucket_bytes)
            self._group = BroadcastGroup(self._store, self._channel.own_host, rank, size, group, nbytes, self._limit)
        self._arriving = []
        for _ in range(AHEAD):
            self._take_part()
        self._barrier.begun = version
        self._barrier.changed.notify_all()

    def _take_part(self) -> None:
        """Take part in the next broadcast: its buffer is free."""
        bucket = len(self._arriving)
        if self._group is not None and bucket < len(self._plan.buckets):
            moved = self._group.broadcast(bucket % AHEAD, bucket_nbytes(self._plan, bucket), self._limit)
            self._arriving.append(moved)
            moved.add_done_callback(self._wake)

    def _wake(self, moved: Future[None]) -> None:
        with self._barrier.changed:
            self._barrier.changed.notify_all()

    def _recv(self, version: int, deadline: Deadline) -> Iterator[WeightChunk]:
        barrier = self._barrier
        with barrier.changed:
            barrier.wait(
                lambda: barrier.begun >= version, version, deadline, lambda: "the trainer did not begin to send"
            )
        for bucket in range(len(self._plan.buckets)):
            buffer = self._arrived(version, bucket, deadline)
            yield WeightChunk([(one.name, view) for one, view in tensors(self._plan, bucket, buffer)])
            with barrier.changed:
                self._barrier.check_newest(version)
                self._take_part()
                self._channel.send({"version": version, "taken": bucket + 1})
        with barrier.changed:  # what the sender said before it knew is known here then: no abort is missed
            self._barrier.check_newest(version)
            if self._plan.buckets:
                said_nothing = "the trainer did not note that all was taken"
                barrier.wait(lambda: self._noted >= version, version, deadline, lambda: said_nothing)

    def _arrived(self, version: int, bucket: int, deadline: Deadline) -> torch.Tensor:
        """Wait for a bucket; returns the buffer it is in."""
        barrier, count = self._barrier, len(self._plan.buckets)
        with barrier.changed:
            self._barrier.check_newest(version)
            group, moved = self._group, self._arriving[bucket]
            await_moved(barrier, moved, version, deadline, lambda: f"bucket {bucket + 1} of {count} did not arrive")
        assert group is not None  # a broadcast was asked of it
        buffer = group.buffers[bucket % AHEAD]
        if (found := heading(buffer)) != (version, bucket):
            raise WeightSyncError(
                f"weight update {version}: expected bucket {bucket + 1}, found bucket {found[1] + 1} of version "
                f"{found[0]}",
                [parameter.name for parameter in parameters_of(self._plan, bucket)],
            )
        return buffer

    def abort(self, version: int) -> None:
        """See `TransportSession`."""
        with self._barrier.changed:
            if version > self._barrier.aborted:
                self._barrier.abort(version)
                self._channel.send({"aborted": version})

    def close(self) -> None:
        """See `TransportSession`."""
        self._barrier.close()
        self._channel.close()
        with self._barrier.changed:
            group = self._group
        if group is not None:
            group.leave()
            group.ended(ENDING_SECONDS)


def await_moved(
    barrier: Barrier, moved: Future[None], version: int, deadline: Deadline, missing: Callable[[], str]
) -> None:
    """Wait, holding `barrier.changed`, for a broadcast.

    Raises:
        WeightSyncError: see `Barrier.wait`; `WeightUpdateAborted` where the broadcast failed, since another rank left.
    """
    barrier.wait(moved.done, version, deadline, missing)
    error = moved.exception()
    if error is not None:
        said = first_line(error)
        raise WeightUpdateAborted(f"weight update {version}: another end left the broadcast ({said})") from error
