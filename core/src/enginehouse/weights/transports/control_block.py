"""What the two ends of a shared-memory connection tell each other: numbers in a little shared memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from enginehouse.engines.weights import ALIGNMENT, TransferPlan, WeightSyncError, WeightUpdateAborted
from enginehouse.weights.transports.deadline import Deadline
from enginehouse.weights.transports.segment import Segment

_WORD = 8
_LINE = ALIGNMENT // _WORD  # words in a cache line; what different processes write lies in different lines

_POLLS_BEFORE_NAPPING = 50
_SHORTEST_NAP_SECONDS = 20e-6
_LONGEST_NAP_SECONDS = 1e-3
_NAP_SHARE = 1 / 32
"""A nap is this part of the wait until then: so much later than necessary a wait ends at most."""

# Line 0, the sender's
BEGUN = 0, 0
"""Version of the newest update begun. What was written before may be overwritten from then on, unless it is held."""
OPENED = 0, 1
"""The newest version for which the words below are set."""
FIRST = 0, 2
"""Number of that update's first bucket; buckets are counted over all updates."""
BUFFER = 0, 3
"""Serial number of the buffer it is written to."""
DESCRIPTOR = 0, 4
"""The sender's file descriptor of that buffer."""
WRITTEN = 0, 5
"""Number of the last bucket written."""
PROCESS = 0, 6
"""The sender's process id."""
CLOSED = 0, 7
"""The sender is gone."""

ABORTED = 1, 0
"""Line 1: updates up to this version fail. The one word both sides write."""

# A line for each receiver
ATTACHED, TAKEN = 0, 1
"""It is there; number of the last bucket it took."""
HOLDS = range(2, _LINE)
"""Serial numbers of the buffers it holds; 0 in those of no use."""


class ControlBlock:
    """The numbers, by line and word.

    Args:
        plan: of the transfer.
        create: this is the sender's end.

    Raises:
        FileNotFoundError: there is no sender on this host.
    """

    def __init__(self, plan: TransferPlan, create: bool):
        name = Segment.name_of(plan.session)
        self.segment = Segment.create(name, (2 + plan.receivers) * ALIGNMENT) if create else Segment.attach(name)
        self._receivers = plan.receivers
        self._words = memoryview(self.segment.memory).cast("q")
        self._fence = threading.Lock()
        self.closed = False  # this end
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
        """A receiver's line."""
        return 2 + receiver

    @property
    def begun(self) -> int:
        """Version of the newest update begun."""
        return self[BEGUN]

    def held(self) -> set[int]:
        """Serial numbers of the buffers that a receiver holds."""
        return {self[self.line(index), word] for index in range(self._receivers) for word in HOLDS} - {0}

    def fence(self) -> None:
        """Order memory accesses before and after, as other processes see them.

        Python has no memory barrier, but a lock is one in each direction, and two in a row are a full one.
        """
        for _ in range(2):
            with self._fence:
                pass

    def wait(self, ready: Callable[[], bool], version: int, deadline: Deadline, missing: Callable[[], str]) -> None:
        """Poll until `ready()`.

        Raises:
            WeightUpdateAborted: `version` was aborted, or an end is closed.
            WeightSyncError: the deadline passed; `missing()` says what did not happen.
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
        """Raise `WeightUpdateAborted` if `version` was aborted or an end is closed."""
        if self[ABORTED] >= version:
            raise WeightUpdateAborted(f"weight update {version} was aborted")
        if self.closed or self[CLOSED]:
            raise WeightUpdateAborted(f"weight update {version}: the connection was closed")

    def abort(self, version: int) -> None:
        """Make updates up to `version` fail on every side."""
        self[ABORTED] = max(self[ABORTED], version)
