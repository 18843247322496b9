"""Numbers in a small shared memory, through which the senders and the receivers of `shared_memory` communicate."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from enginehouse.engines.weights import ALIGNMENT, TransferPlan, WeightSyncError, WeightUpdateAborted
from enginehouse.weights.transports.deadline import Deadline
from enginehouse.weights.transports.shared_segment import SharedSegment

_WORD = 8
_LINE = ALIGNMENT // _WORD  # words in a cache line

_POLLS_BEFORE_NAPPING = 50
_SHORTEST_NAP_SECONDS = 20e-6
_LONGEST_NAP_SECONDS = 1e-3
_NAP_SHARE = 1 / 32
"""Length of a nap as a fraction of the wait so far, so that a wait ends late by at most this fraction."""

# The first sender writes line 0. Each process writes to its own cache lines.
BEGUN = 0, 0
"""Version of the newest update. Once it is set, buffers that nobody holds may be overwritten."""
OPENED = 0, 1
"""Newest version for which the words below are valid."""
BUFFER = 0, 2
"""Serial number of the update's buffer."""
DESCRIPTOR = 0, 3
"""The first sender's file descriptor of that buffer."""
PROCESS = 0, 4
"""The first sender's process id."""
CLOSED = 0, 5
"""1 once the first sender has died or closed."""

ABORTED = 1, 0
"""Updates up to this version fail. Both sides write line 1."""

# Each receiver and then each sender writes one further line
ATTACHED, DONE, SUMMING, SUMMED = 0, 1, 2, 3
"""1 once the process is attached; the number of the last bucket that it took or wrote; and that of the last bucket that
a receiver began to sum for all receivers, and whose checksums it wrote."""
HOLDS = range(4, _LINE)
"""Serial numbers of the buffers that the receiver holds; 0 in unused words."""


class ControlBlock:
    """The shared numbers, by cache line and word, and behind them checksums: of each parameter, and of the part of it
    that each training rank sent.

    Args:
        create: True for the first sender, which creates the memory.

    Raises:
        FileNotFoundError: there is no sender on this host.
    """

    def __init__(self, plan: TransferPlan, create: bool):
        name = SharedSegment.name_of(plan.session)
        self._sums = (2 + plan.receivers + plan.senders) * _LINE
        size = (self._sums + len(plan.parameters) * (1 + plan.senders)) * _WORD
        self.segment = SharedSegment.create(name, size) if create else SharedSegment.attach(name)
        self._plan = plan
        self._words = memoryview(self.segment.memory).cast("q")
        self._fence = threading.Lock()
        self.closed = False  # of this end
        if create:
            self[BEGUN] = self[OPENED] = self[ABORTED] = -1

    def __getitem__(self, at: tuple[int, int]) -> int:
        line, word = at
        return self._words[line * _LINE + word]

    def __setitem__(self, at: tuple[int, int], value: int) -> None:
        line, word = at
        self._words[line * _LINE + word] = value

    @staticmethod
    def receiver(index: int) -> int:
        """Return the line of a receiver."""
        return 2 + index

    def sender(self, rank: int) -> int:
        """Return the line of a training rank."""
        return 2 + self._plan.receivers + rank

    def number(self, version: int, bucket: int) -> int:
        """Return the number of an update's bucket, counted from 1, which is larger than those of older versions."""
        return version * len(self._plan.buckets) + bucket + 1

    def write_sum(self, parameter: int, part: int, total: str) -> None:
        """Write a `checksum`; see `read_sum`."""
        value = int(total, 16)
        self._words[self._place(parameter, part)] = value - 2**64 if value >= 2**63 else value

    def read_sum(self, parameter: int, part: int) -> str:
        """Return the `checksum` of a parameter, if `part` is 0, or of its parts, which are counted from 1."""
        return f"{self._words[self._place(parameter, part)] % 2**64:016x}"

    def _place(self, parameter: int, part: int) -> int:
        return self._sums + parameter * (1 + self._plan.senders) + part

    def not_taken(self, number: int) -> list[int]:
        """Return the receivers that have not taken the bucket with this number."""
        return [index for index in range(self._plan.receivers) if self[self.receiver(index), DONE] < number]

    def not_written(self, number: int) -> list[int]:
        """Return the training ranks that have not written the bucket with this number."""
        return [rank for rank in range(self._plan.senders) if self[self.sender(rank), DONE] < number]

    @property
    def all_attached(self) -> bool:
        """True if every other process is attached."""
        plan = self._plan
        lines = [*map(self.receiver, range(plan.receivers)), *map(self.sender, range(1, plan.senders))]
        return all(self[line, ATTACHED] for line in lines)

    @property
    def begun(self) -> int:
        return self[BEGUN]

    def held_serials(self) -> set[int]:
        """Return the serial numbers of the buffers that receivers hold."""
        lines = map(self.receiver, range(self._plan.receivers))
        return {self[line, word] for line in lines for word in HOLDS} - {0}

    def fence(self) -> None:
        """Make other processes see the memory accesses before this call earlier than those after it. Python has no
        memory barrier, but taking and releasing a lock twice has the effect of a full barrier."""
        for _ in range(2):
            with self._fence:
                pass

    def wait(self, ready: Callable[[], bool], version: int, deadline: Deadline, missing: Callable[[], str]) -> None:
        """Poll until `ready()`, and restart the deadline.

        Raises:
            WeightUpdateAborted: `version` was aborted, or a side was closed.
            WeightSyncError: the deadline passed; `missing()` describes what did not happen.
        """
        polls = 0
        begun = time.monotonic()
        self.check(version)
        while not ready():
            self.check(version)
            if deadline.passed:
                raise WeightSyncError(f"weight update {version}: {missing()} within {deadline.seconds:g} s")
            if polls < _POLLS_BEFORE_NAPPING:
                polls += 1
                time.sleep(0)
            else:
                nap = (time.monotonic() - begun) * _NAP_SHARE
                time.sleep(min(max(nap, _SHORTEST_NAP_SECONDS), _LONGEST_NAP_SECONDS))
        deadline.restart()
        self.fence()

    def wait_opened(self, version: int, deadline: Deadline) -> None:
        """Wait until the first sender has opened `version`. Raises as `wait` and `check_newest` do."""
        self.wait(
            lambda: self[OPENED] >= version or self.begun > version,
            version,
            deadline,
            lambda: "the trainer did not begin to send",
        )
        self.check_newest(version)

    def check_newest(self, version: int) -> None:
        """Check that the first sender has not begun a newer update, whose bytes may overwrite those of this update.
        Raises `WeightSyncError`."""
        if self.begun != version:
            raise WeightSyncError(
                f"this process waits for weight update {version}, but the trainer has already begun update {self.begun}"
            )

    def check(self, version: int) -> None:
        """Raise `WeightUpdateAborted` if `version` was aborted or a side was closed."""
        if self[ABORTED] >= version:
            raise WeightUpdateAborted(f"weight update {version} was aborted")
        if self.closed or self[CLOSED]:
            raise WeightUpdateAborted(f"weight update {version}: the connection was closed")

    def abort(self, version: int) -> None:
        """Make updates up to `version` fail on every side."""
        if version > self[ABORTED]:
            self[ABORTED] = version
