"""State that the threads of a session share, and waits that end at a deadline, an abort or a lost connection."""

from __future__ import annotations

import threading
from collections.abc import Callable

from enginehouse.engines.weights import WeightSyncError, WeightUpdateAborted
from enginehouse.weights.transports.deadline import Deadline


class Barrier:
    """State of a connection that several threads share. All fields are read and written under `changed`.

    Attributes:
        begun: version of the newest update.
        aborted: updates up to this version fail.
        broken: the reason why the connection is broken; empty if it is not.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.begun = -1
        self.aborted = -1
        self.broken = ""

    def check(self, version: int) -> None:
        """Raise `WeightUpdateAborted` if `version` was aborted or the connection is broken."""
        if self.aborted >= version:
            raise WeightUpdateAborted(f"weight update {version} was aborted")
        if self.broken:
            raise WeightUpdateAborted(f"weight update {version}: {self.broken}")

    def check_newest(self, version: int) -> None:
        """Call `check`, and raise `WeightSyncError` if a newer update has begun."""
        self.check(version)
        if self.begun > version:
            raise WeightSyncError(
                f"the receiver waits for weight update {version}, but the trainer has already begun update {self.begun}"
            )

    def wait(self, ready: Callable[[], bool], version: int, deadline: Deadline, missing: Callable[[], str]) -> None:
        """Wait until `ready()` is True, and restart the deadline. The caller holds `changed`.

        If `ready()` is True, a broken connection raises no error, but an abort does.

        Raises:
            WeightUpdateAborted: `version` was aborted, or the connection broke before `ready()` was True.
            WeightSyncError: the deadline passed; `missing()` describes what did not happen.
        """
        self.changed.wait_for(lambda: ready() or self.aborted >= version or bool(self.broken), deadline.left)
        if self.aborted >= version or not ready():
            self.check(version)
            raise WeightSyncError(f"weight update {version}: {missing()} within {deadline.seconds:g} s")
        deadline.restart()

    def begin(self, version: int) -> None:
        """Make `version` the newest update. The caller holds `changed`. Raises `WeightSyncError` if the version is not
        newer than the last, or was aborted already."""
        if version <= self.begun:
            raise WeightSyncError(f"weight update {version} must be newer than the last begun update, {self.begun}")
        self.check(version)
        self.begun = version
        self.changed.notify_all()

    def abort(self, version: int) -> None:
        """Make updates up to `version` fail. The caller holds `changed`."""
        self.aborted = max(self.aborted, version)
        self.changed.notify_all()

    def close(self, why: str = "the connection was closed") -> None:
        """Make every wait fail. The error states `why` of the first call of this method."""
        with self.changed:
            self.broken = self.broken or why
            self.changed.notify_all()
