"""How an exception travels from a worker to the controller: as plain data, the exception itself pickled inside."""

from __future__ import annotations

import time
import traceback
from types import TracebackType

from enginehouse.controller.errors import (
    RemoteError,
    RemoteTraceback,
    WorkerDied,
    WorkerError,
    pickled_error,
    unpickled_error,
)
from enginehouse.controller.launchers.stacks import OURS


class WorkerFailure(Exception):
    """What a worker raises in place of what was raised in it. Never seen outside the controller.

    Attributes:
        at: `time.time()` when it happened, to find the first of several.
    """

    def __init__(
        self,
        role: str,
        rank: int,
        node: str,
        pid: int,
        method: str,
        type_name: str,
        text: str,
        traceback_text: str,
        pickled: bytes | None,
        log_lines: tuple[str, ...],
        at: float,
    ):
        super().__init__(role, rank, node, pid, method, type_name, text, traceback_text, pickled, log_lines, at)
        self.role = role
        self.rank = rank
        self.node = node
        self.pid = pid
        self.method = method
        self.type_name = type_name
        self.text = text
        self.traceback_text = traceback_text
        self.pickled = pickled
        self.log_lines = log_lines
        self.at = at

    @classmethod
    def of(
        cls, error: BaseException, role: str, rank: int, node: str, pid: int, method: str, log_lines: tuple[str, ...]
    ) -> WorkerFailure:
        """Pack an exception that was just caught."""
        name, text = type(error).__qualname__, _traceback_text(error)
        return cls(role, rank, node, pid, method, name, str(error), text, pickled_error(error), log_lines, time.time())

    def to_error(self, note: str = "") -> WorkerError:
        """The error to raise on the controller.

        Args:
            note: a sentence to add to the message.
        """
        where = f"{self.role} rank {self.rank} (node {self.node}, pid {self.pid})"
        message = f"{where}: {self.method!r} raised {self.type_name}: {self.text}"
        for part in (note, _quoted(self.log_lines)):
            message += f"\n{part}" if part else ""
        error = RemoteError(
            message, role=self.role, rank=self.rank, node=self.node, pid=self.pid, method=self.method,
            log_lines=self.log_lines,
        )  # fmt: skip
        error.type_name = self.type_name
        error.traceback_text = self.traceback_text
        error.cause = unpickled_error(self.pickled)
        error.__cause__ = RemoteTraceback(self.traceback_text)
        return error


def wrap_error(error: BaseException, role: str, node: str, pid: int, method: str) -> WorkerError:
    """The error for what a worker in this process raised: as for one that travelled, the very exception behind it.

    Args:
        error: an exception that was just caught.
    """
    name, text = type(error).__qualname__, _traceback_text(error)
    raised = WorkerFailure(role, 0, node, pid, method, name, str(error), text, None, (), time.time()).to_error()
    assert isinstance(raised, RemoteError)
    raised.cause = raised.__cause__ = error
    return raised


def cut_off_error(ended: str, role: str, rank: int, node: str, pid: int, method: str) -> WorkerDied:
    """The error of a call that still ran when its group was ended on purpose.

    Args:
        ended: what was done to the group.
    """
    message = f"{role} rank {rank} (node {node}, pid {pid}): {method!r} had not ended when its group was: {ended}"
    return WorkerDied(message, role=role, rank=rank, node=node, pid=pid, method=method)


class SourceDied(WorkerFailure):
    """Raised where an argument was the output of a process that died: it names that process, not the one it was for."""

    def to_error(self, note: str = "") -> WorkerError:
        """See `WorkerFailure.to_error`."""
        where = f"{self.role} rank {self.rank} (node {self.node}, pid {self.pid})"
        message = f"{where}: the process died during {self.method!r}: {self.text}" + (f"\n{note}" if note else "")
        return WorkerDied(message, role=self.role, rank=self.rank, node=self.node, pid=self.pid, method=self.method)


def _quoted(lines: tuple[str, ...]) -> str:
    return "\n".join(["Its last log lines:", *(f"  {line}" for line in lines)]) if lines else ""


def _traceback_text(error: BaseException) -> str:
    return "".join(traceback.format_exception(type(error), error, _outside(error.__traceback__)))


def _outside(tb: TracebackType | None) -> TracebackType | None:
    """The traceback from where it leaves our own machinery, which tells a user nothing."""
    start = tb
    while start is not None and OURS in start.tb_frame.f_code.co_filename.replace("\\", "/"):
        start = start.tb_next
    return start or tb
