"""Weights between processes of one host: one sender writes a version once, and all receivers read it where it lies.

Training rank 0 writes each version into an *area*, memory as large as the model that no receiver holds. Receivers read
it bucket by bucket as it is written, as tensors that view the area. An engine that holds the area (`HostMemory`) need
not copy it; the next version is then written into another. So there are mostly two, one served and one being written,
whatever the number of receivers; one, where nobody holds any; and one more whenever all are held.

Areas have no names, so nothing is left over whoever is killed. What both ends say to each other (`Ledger`) lies in a
little shared memory with a name, which is removed once every receiver is attached; before that, Python's resource
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
from enginehouse.weights.transports.area import Area, AreaHold
from enginehouse.weights.transports.control_block import (
    AREA,
    ATTACHED,
    BEGUN,
    CLOSED,
    DESCRIPTOR,
    FIRST,
    HOLDS,
    OPENED,
    PROCESS,
    TAKEN,
    WRITTEN,
    Ledger,
)
from enginehouse.weights.transports.deadline import Deadline
from enginehouse.weights.transports.ends import IdleSender, Receiver, Sender

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
        self._serial = 0  # of the last area made
        self._areas: list[Area] = [self._another()]
        self._ledger = ledger = Ledger(plan, create=True)
        ledger[PROCESS] = os.getpid()
        self._tell(self._areas[0])

    def _another(self) -> Area:
        area = Area.create(self._plan, self._serial + 1)
        self._serial += 1
        return area

    def _tell(self, area: Area) -> None:
        """Say where an area is."""
        self._ledger[AREA] = area.serial
        self._ledger[DESCRIPTOR] = area.descriptor

    def _unheld(self) -> Area:
        """An area nobody holds, a new one if need be; gives back what is free beside it."""
        held = self._ledger.held()
        free = [area for area in self._areas if area.serial not in held] or [self._another()]
        self._areas = [area for area in self._areas if area.serial in held] + free[:1]
        return free[0]

    def _send(self, version: int, source: Iterator[tuple[str, torch.Tensor]], deadline: Deadline) -> dict[str, str]:
        ledger = self._ledger
        if version <= ledger.begun:
            raise WeightSyncError(f"weight update {version} is not newer than {ledger.begun}, the last one begun")
        ledger.check(version)
        ledger[BEGUN] = version  # from here on nobody can come to hold what was written before
        ledger.fence()
        area = self._unheld()
        self._tell(area)
        first = ledger[FIRST] = self._written + 1
        ledger.fence()
        ledger[OPENED] = version
        sums: dict[str, str] = {}
        planned = in_plan_order(self._plan, source)
        for bucket in range(len(self._plan.buckets)):
            number = first + bucket
            if bucket >= AHEAD:
                self._wait_taken(number - AHEAD, first, version, deadline)
            self._drop_name()
            for _, view in area.views(bucket):
                parameter, tensor = next(planned)
                tensor = tensor.detach().to("cpu").contiguous()
                sums[parameter.name] = copy_with_checksum(tensor, view)
            ledger.check(version)
            ledger.fence()
            ledger[WRITTEN] = self._written = number
        for _ in planned:  # raises where there is more than was planned
            pass
        self._wait_taken(self._written, first, version, deadline)
        return sums

    def _drop_name(self) -> None:
        """Once nobody needs the ledger's name any more, remove it: what has no name cannot be left over."""
        ledger = self._ledger
        if all(ledger[ledger.line(index), ATTACHED] for index in range(self._plan.receivers)):
            ledger.segment.unlink()

    def _wait_taken(self, number: int, first: int, version: int, deadline: Deadline) -> None:
        ledger = self._ledger

        def behind() -> list[int]:
            return [i for i in range(self._plan.receivers) if ledger[ledger.line(i), TAKEN] < number]

        def missing() -> str:
            late = ", ".join(
                f"{index}{'' if ledger[ledger.line(index), ATTACHED] else ' (never connected)'}" for index in behind()
            )
            return f"rollout replica {late} did not take bucket {number - first + 1} of {len(self._plan.buckets)}"

        if len(self._plan.buckets):
            ledger.wait(lambda: not behind(), version, deadline, missing)

    def abort(self, version: int) -> None:
        """See `TransportSession`."""
        self._ledger.abort(version)

    def close(self) -> None:
        """See `TransportSession`. An area goes with the last receiver that holds it."""
        self._ledger[CLOSED] = 1
        self._ledger.segment.unlink()
        self._areas.clear()


class SharedMemoryReceiver(Receiver):
    """A rollout replica's end."""

    def __init__(self, plan: TransferPlan, index: int):
        self._plan = plan
        self._index = index
        try:
            self._ledger = Ledger(plan, create=False)
        except FileNotFoundError as error:
            raise WeightSyncError(
                f"rollout replica {index} does not see the shared memory of training rank 0. Transport 'shared_memory' "
                "needs both on one host; choose another transport."
            ) from error
        self._line = self._ledger.line(index)
        self._areas: list[Area] = []  # mapped: the latest, and those held
        self._words = deque(HOLDS)  # of the line, not in use
        self._area()  # what cannot be opened is better known now than at the first update
        self._ledger[self._line, ATTACHED] = 1

    def _recv(self, version: int, deadline: Deadline) -> Iterator[WeightChunk]:
        """All chunks of an update have one `memory`; none, where an engine goes on using the objects of more than a few
        updates."""
        ledger = self._ledger
        count = len(self._plan.buckets)
        ledger.wait(
            lambda: ledger[OPENED] >= version or ledger.begun > version,
            version,
            deadline,
            lambda: "the trainer did not begin to send",
        )
        self._check_newest(version)
        first, area = self._opened(version)
        memory = AreaHold(area, version, ledger, self._line, self._words) if self._words else None
        for bucket in range(count):
            number = first + bucket
            arrived = f"bucket {bucket + 1} of {count}"
            ledger.wait(
                lambda number=number: ledger[WRITTEN] >= number,  # type: ignore[misc]
                version,
                deadline,
                lambda arrived=arrived: f"{arrived} did not arrive",  # type: ignore[misc]
            )
            self._check_newest(version)
            yield WeightChunk([(parameter.name, view) for parameter, view in area.views(bucket)], memory=memory)
            ledger.check(version)
            ledger.fence()
            self._check_newest(version)
            ledger[self._line, TAKEN] = number

    def _check_newest(self, version: int) -> None:
        """See that the sender is not at another update: what was read would not be of this one."""
        begun = self._ledger.begun
        if begun != version:
            raise WeightSyncError(f"weight update {version} was expected, the trainer is already at {begun}")

    def _opened(self, version: int) -> tuple[int, Area]:
        """The number of the update's first bucket, and the area it arrives in."""
        ledger = self._ledger
        first = ledger[FIRST]
        try:
            area = self._area()
        except WeightSyncError:
            self._check_newest(version)  # then it is no wonder
            raise
        ledger.fence()
        self._check_newest(version)
        return first, area

    def _area(self) -> Area:
        """The area the sender writes to, mapped.

        Raises:
            WeightSyncError: it cannot be opened.
        """
        serial = self._ledger[AREA]
        found = next((area for area in self._areas if area.serial == serial), None)
        if found is None:
            path = f"/proc/{self._ledger[PROCESS]}/fd/{self._ledger[DESCRIPTOR]}"
            try:
                found = Area.attach(self._plan, path, serial)
            except OSError as error:
                raise WeightSyncError(
                    f"rollout replica {self._index} cannot map the memory of training rank 0: {error}. Transport "
                    "'shared_memory' needs both to be processes of one user that see each other in /proc (containers: "
                    "one PID namespace); choose another transport."
                ) from error
        held = {self._ledger[self._line, word] for word in HOLDS}
        self._areas = [found, *(area for area in self._areas if area.serial in held and area is not found)]
        return found

    def abort(self, version: int) -> None:
        """See `TransportSession`."""
        self._ledger.abort(version)

    def close(self) -> None:
        """See `TransportSession`. What is held stays."""
        self._ledger.closed = True
        self._areas.clear()
