"""Representation of exceptions that are sent from a worker to the controller: plain data and the pickled exception."""

from __future__ import annotations

import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple, Self

from enginehouse.controller.errors import (
    RemoteError,
    RemoteTraceback,
    WorkerDied,
    WorkerError,
    pickled_error,
    unpickled_error,
)
from enginehouse.controller.launchers.stacks import OURS


class CallSite(NamedTuple):
    """Place of a call, with the fields that every `WorkerError` has."""

    role: str
    rank: int
    node: str
    pid: int
    method: str

    def __str__(self) -> str:
        return f"{self.role} rank {self.rank} (node {self.node}, pid {self.pid})"


@dataclass(eq=False, repr=False)
class WorkerFailure(Exception):
    """Represents an exception that a worker raised. It is used only inside the controller.

    It unpickles from its positional arguments, so pass the fields without a default by position.

    Attributes:
        pickled: the pickled exception; None if it does not pickle.
        log_lines: last log lines of the worker, oldest first.
        at: `time.time()` of the exception, to find the first of several exceptions.
    """

    site: CallSite
    type_name: str
    text: str
    traceback_text: str
    pickled: bytes | None = None
    log_lines: tuple[str, ...] = ()
    at: float = field(default_factory=time.time)

    @classmethod
    def pack(cls, error: BaseException, site: CallSite, log_lines: tuple[str, ...] = ()) -> Self:
        """Pack an exception that was just caught."""
        name, text = type(error).__qualname__, _format_traceback(error)
        return cls(site, name, str(error), text, pickled_error(error), log_lines, time.time())

    def to_error(self, note: str = "") -> WorkerError:
        """Make the error that the controller raises, with the sentence `note` at the end of its message."""
        message = f"{self.site}: {self.site.method!r} raised {self.type_name}: {self.text}" + (note and f"\n{note}")
        error = RemoteError(message + quote_log(self.log_lines), **self.site._asdict(), log_lines=self.log_lines)
        error.type_name = self.type_name
        error.traceback_text = self.traceback_text
        error.cause = unpickled_error(self.pickled)
        error.__cause__ = RemoteTraceback(self.traceback_text)
        return error


class SourceDied(WorkerFailure):
    """Raised if an argument is the output of a process that died. `site` describes that process and its call."""

    def to_error(self, note: str = "") -> WorkerError:
        message = f"{self.site}: the process died during {self.site.method!r}: {self.text}" + (note and f"\n{note}")
        return WorkerDied(message, **self.site._asdict())


def wrap_error(error: BaseException, site: CallSite) -> WorkerError:
    """Wrap an exception that a worker in this process raised. The exception itself becomes the cause."""
    wrapped = WorkerFailure(site, type(error).__qualname__, str(error), _format_traceback(error)).to_error()
    assert isinstance(wrapped, RemoteError)
    wrapped.cause = wrapped.__cause__ = error
    return wrapped


def cut_off_error(ended: str, site: CallSite) -> WorkerDied:
    """Make the error of a call that still ran when its group was ended on purpose. `ended` is the reason."""
    message = f"{site}: {site.method!r} had not ended when its group was ended: {ended}"
    return WorkerDied(message, **site._asdict())


def quote_log(lines: Sequence[str]) -> str:
    """Format the last log lines of a worker as the end of an error's message."""
    return "\n".join(["\nIts last log lines:", *(f"  {line}" for line in lines)]) if lines else ""


def _format_traceback(error: BaseException) -> str:
    return "".join(traceback.format_exception(type(error), error, _skip_ours(error.__traceback__)))


def _skip_ours(tb: TracebackType | None) -> TracebackType | None:
    """Remove the launchers' own frames from the start of a traceback."""
    start = tb
    while start is not None and OURS in start.tb_frame.f_code.co_filename.replace("\\", "/"):
        start = start.tb_next
    return start or tb
