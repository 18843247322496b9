"""Broadcasts weights from training rank 0 to any number of rollout replicas, on any hosts, in a separate group.

Weights are sent bucket by bucket in collectives of a `BroadcastGroup`. Messages use a TCP connection from each replica
to rank 0 (`Rendezvous`).

At first a replica takes part in the broadcasts of two buckets. Once it has taken bucket k, it takes part in the
broadcast of bucket k + 2. The sender begins a broadcast only when all replicas take part in it. So each broadcast ends,
unless a process dies or hangs until the deadline. After a failed update the group is abandoned in any case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
from enginehouse.weights.buckets import AHEAD, in_plan_order, parameters_of, view_parameters
from enginehouse.weights.checksums import copy_with_checksum
from enginehouse.weights.host_memory import lay_out
from enginehouse.weights.transports.barrier import Barrier
from enginehouse.weights.transports.broadcast_group import BroadcastGroup, buffer_bytes, read_heading, write_heading
from enginehouse.weights.transports.deadline import Deadline
from enginehouse.weights.transports.ends import BucketTransport, IdleSender, Receiver, Sender
from enginehouse.weights.transports.rendezvous import Rendezvous, join
from enginehouse.weights.transports.store import Store

if TYPE_CHECKING:
    import torch

ENDING_SECONDS = 1.0
"""Time that `close` waits for a group's thread. If another rank blocks it longer, the thread ends later by itself."""


class CollectiveTransport(BucketTransport):
    """Broadcasts weights to rollout replicas on any hosts, through `torch.distributed`."""

    name = "collective"

    def connect(self, plan: TransferPlan, side: str, index: int) -> TransportSession:
        """Open one side of the connection; see `WeightTransport`. Raises `WeightSyncError` if a receiver cannot reach
        the sender's address, or the sender belongs to another run."""
        if side == "send":
            return CollectiveSender(plan) if index == 0 else IdleSender()
        return CollectiveReceiver(plan, index)


def bucket_nbytes(plan: TransferPlan, bucket: int) -> int:
    """Return the number of bytes to send for a bucket, including its heading."""
    return buffer_bytes(sum(plan.parameters[index].aligned_nbytes for index in plan.buckets[bucket]))


def view_bucket(plan: TransferPlan, bucket: int, buffer: torch.Tensor) -> list[tuple[ParamMeta, torch.Tensor]]:
    """Return the parameters of a bucket, each with a tensor that views the buffer after its heading."""
    parameters = parameters_of(plan, bucket)
    return view_parameters(parameters, lay_out(parameters)[0], buffer[ALIGNMENT:])


class CollectiveSender(Sender):
    """The sending side, at training rank 0. Receivers connect to `port`."""

    def __init__(self, plan: TransferPlan):
        self._plan = plan
        self._barrier = Barrier()
        self._store = Store(self._barrier, self._publish)
        self._group: BroadcastGroup | None = None
        self._groups = 0
        self._rendezvous = Rendezvous(self._barrier, plan, range(plan.receivers), self._on_message)
        self.port: int = self._rendezvous.port

    def _on_message(self, index: int, message: dict[str, Any]) -> None:
        self._store.put(message["note"], bytes.fromhex(message["value"]))
        self._rendezvous.send_all(message)

    def _publish(self, name: str, value: bytes) -> None:
        self._rendezvous.send_all({"note": name, "value": value.hex()})

    def _send(self, version: int, source: Iterator[tuple[str, torch.Tensor]], deadline: Deadline) -> dict[str, str]:
        self._rendezvous.begin(version, deadline)
        if not self._plan.buckets:
            return self._send_nothing(version, source, deadline)
        group = self._group = self._group or self._new_group(deadline)
        try:
            return self._broadcast(group, version, source, deadline)
        except BaseException:
            self._group = None
            group.leave()
            raise

    def _broadcast(
        self, group: BroadcastGroup, version: int, source: Iterator[tuple[str, torch.Tensor]], deadline: Deadline
    ) -> dict[str, str]:
        self._begin(version, group.number, deadline)
        sums: dict[str, str] = {}
        broadcasts: list[Future[None]] = []
        planned = in_plan_order(self._plan, source)
        for bucket in range(len(self._plan.buckets)):
            slot = bucket % AHEAD
            self._wait_taken(broadcasts[: max(0, bucket - AHEAD + 1)], version, deadline)
            write_heading(group.buffers[slot], version, bucket)
            for _, view in view_bucket(self._plan, bucket, group.buffers[slot]):
                parameter, tensor = next(planned)
                sums[parameter.name] = copy_with_checksum(tensor.detach().to("cpu").contiguous(), view)
            broadcasts.append(group.broadcast(slot, bucket_nbytes(self._plan, bucket), deadline))
            broadcasts[-1].add_done_callback(self._wake)
        for _ in planned:  # raises if there are surplus weights
            pass
        for count in range(max(1, len(broadcasts) - AHEAD + 1), len(broadcasts) + 1):
            self._wait_taken(broadcasts[:count], version, deadline)
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
        size, nbytes = 1 + self._plan.receivers, buffer_bytes(self._plan.bucket_bytes)
        own_host = next(iter(self._rendezvous.channels.values())).own_host  # the address that receivers use
        return BroadcastGroup(self._store, own_host, 0, size, self._groups, nbytes, deadline)

    def _wake(self, moved: Future[None]) -> None:
        with self._barrier.changed:
            self._barrier.changed.notify_all()

    def _wait_taken(self, broadcasts: list[Future[None]], version: int, deadline: Deadline) -> None:
        """Wait until every receiver has taken the buckets of these broadcasts."""
        rendezvous, count = self._rendezvous, len(broadcasts)

        def missing() -> str:
            return rendezvous.missing(version, count)

        with self._barrier.changed:
            for last in broadcasts[-1:]:  # they end in order, and all after a failed broadcast fail
                await_broadcast(self._barrier, last, version, deadline, missing)
            self._barrier.wait(lambda: not (count and rendezvous.behind(version, count)), version, deadline, missing)

    def abort(self, version: int) -> None:
        with self._barrier.changed:
            self._rendezvous.abort(version)

    def close(self) -> None:
        self._rendezvous.close()
        if self._group is not None:
            self._group.leave()
            self._group.await_end(ENDING_SECONDS)


class CollectiveReceiver(Receiver):
    """The receiving side, at a rollout replica."""

    def __init__(self, plan: TransferPlan, index: int):
        self._plan = plan
        self._index = index
        self._barrier = Barrier()
        self._store = Store(self._barrier, lambda name, value: self._channel.send({"note": name, "value": value.hex()}))
        self._noted = -1  # newest version whose end the sender has confirmed
        self._group: BroadcastGroup | None = None
        self._arriving: list[Future[None]] = []  # buckets of the newest update, arrived or not
        self._limit = Deadline(0.0)  # of the newest update, from its last bucket
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
        """Take part in an update's first broadcasts, even if it was aborted, because the sender may have begun them."""
        self._limit = Deadline(seconds)
        if group and (self._group is None or self._group.number != group):
            if self._group is not None:
                self._group.leave()
            rank, size, nbytes = 1 + self._index, 1 + self._plan.receivers, buffer_bytes(self._plan.bucket_bytes)
            self._group = BroadcastGroup(self._store, self._channel.own_host, rank, size, group, nbytes, self._limit)
        self._arriving = []
        for _ in range(AHEAD):
            self._take_part()
        self._barrier.begun = version
        self._barrier.changed.notify_all()

    def _take_part(self) -> None:
        """Take part in the next broadcast, whose buffer is free."""
        bucket = len(self._arriving)
        if self._group is not None and bucket < len(self._plan.buckets):
            broadcast = self._group.broadcast(bucket % AHEAD, bucket_nbytes(self._plan, bucket), self._limit)
            self._arriving.append(broadcast)
            broadcast.add_done_callback(self._wake)

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
            buffer = self._await_bucket(version, bucket, deadline)
            yield WeightChunk([(entry.name, view) for entry, view in view_bucket(self._plan, bucket, buffer)])
            with barrier.changed:
                self._barrier.check_newest(version)
                self._limit.restart()
                self._take_part()
                self._channel.send({"version": version, "taken": bucket + 1})
        with barrier.changed:  # wait for the sender's confirmation, so that no earlier abort is missed
            self._barrier.check_newest(version)
            if self._plan.buckets:
                missing = "the trainer did not confirm the last bucket"
                barrier.wait(lambda: self._noted >= version, version, deadline, lambda: missing)

    def _await_bucket(self, version: int, bucket: int, deadline: Deadline) -> torch.Tensor:
        """Wait for a bucket, and return its buffer."""
        barrier, count = self._barrier, len(self._plan.buckets)
        with barrier.changed:
            self._barrier.check_newest(version)
            group, broadcast = self._group, self._arriving[bucket]
            await_broadcast(
                barrier, broadcast, version, deadline, lambda: f"bucket {bucket + 1} of {count} did not arrive"
            )
        assert group is not None  # the group has a broadcast
        buffer = group.buffers[bucket % AHEAD]
        if (heading := read_heading(buffer)) != (version, bucket):
            raise WeightSyncError(
                f"weight update {version}: expected bucket {bucket + 1}, found bucket {heading[1] + 1} of version "
                f"{heading[0]}",
                [parameter.name for parameter in parameters_of(self._plan, bucket)],
            )
        return buffer

    def abort(self, version: int) -> None:
        with self._barrier.changed:
            if version > self._barrier.aborted:
                self._barrier.abort(version)
                self._channel.send({"aborted": version})

    def close(self) -> None:
        self._barrier.close()
        self._channel.close()
        with self._barrier.changed:
            group = self._group
        if group is not None:
            group.leave()
            group.await_end(ENDING_SECONDS)


def await_broadcast(
    barrier: Barrier, broadcast: Future[None], version: int, deadline: Deadline, missing: Callable[[], str]
) -> None:
    """Wait for a broadcast, holding `barrier.changed`.

    Raises:
        WeightSyncError: see `Barrier.wait`.
        WeightUpdateAborted: the broadcast failed, because another rank left.
    """
    barrier.wait(broadcast.done, version, deadline, missing)
    error = broadcast.exception()
    if error is not None:
        reason = first_line(error)
        raise WeightUpdateAborted(f"weight update {version}: another rank left the broadcast ({reason})") from error
