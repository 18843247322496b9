"""Numbers in a small shared memory, through which the sender and the receivers of `shared_memory` communicate."""

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

# The sender writes line 0. Each process writes to its own cache lines.
BEGUN = 0, 0
"""Version of the newest update. Once it is set, buffers that nobody holds may be overwritten."""
OPENED = 0, 1
"""Newest version for which the words below are valid."""
FIRST = 0, 2
"""Number of the update's first bucket, counted over all updates."""
BUFFER = 0, 3
"""Serial number of the update's buffer."""
DESCRIPTOR = 0, 4
"""The sender's file descriptor of that buffer."""
WRITTEN = 0, 5
"""Number of the last bucket written."""
PROCESS = 0, 6
"""The sender's process id."""
CLOSED = 0, 7
"""1 once the sender has died or closed."""

ABORTED = 1, 0
"""Updates up to this version fail. Both sides write line 1."""

# Each receiver writes one further line
ATTACHED, TAKEN = 0, 1
"""1 once the receiver is attached, and the number of the last bucket that it took."""
HOLDS = range(2, _LINE)
"""Serial numbers of the buffers that the receiver holds; 0 in unused words."""


class ControlBlock:
    """The shared numbers, by cache line and word.

    Args:
        create: True for the sender, which creates the memory.

    Raises:
        FileNotFoundError: there is no sender on this host.
    """

    def __init__(self, plan: TransferPlan, create: bool):
        name = SharedSegment.name_of(plan.session)
        self.segment = (
            SharedSegment.create(name, (2 + plan.receivers) * ALIGNMENT) if create else SharedSegment.attach(name)
        )
        self._receivers = plan.receivers
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
    def line(receiver: int) -> int:
        return 2 + receiver

    @property
    def begun(self) -> int:
        return self[BEGUN]

    def held_serials(self) -> set[int]:
        """Return the serial numbers of the buffers that receivers hold."""
        return {self[self.line(index), word] for index in range(self._receivers) for word in HOLDS} - {0}

    def fence(self) -> None:
        """Make other processes see the memory accesses before this call earlier than those after it. Python has no
        memory barrier, but taking and releasing a lock twice has the effect of a full barrier."""
        for _ in range(2):
            with self._fence:
                pass

    def wait(self, ready: Callable[[], bool], version: int, deadline: Deadline, missing: Callable[[], str]) -> None:
        """Poll until `ready()`.

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
        self.fence()

    def check(self, version: int) -> None:
        """Raise `WeightUpdateAborted` if `version` was aborted or a side was closed."""
        if self[ABORTED] >= version:
            raise WeightUpdateAborted(f"weight update {version} was aborted")
        if self.closed or self[CLOSED]:
            raise WeightUpdateAborted(f"weight update {version}: the connection was closed")

    def abort(self, version: int) -> None:
        """Make updates up to `version` fail on every side."""
        self[ABORTED] = max(self[ABORTED], version)
