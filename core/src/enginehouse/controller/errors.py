"""Errors between the controller and its workers. All of them pickle: a controller may itself run inside a Ray task."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from enginehouse.errors import EnginehouseError, SaveError, UserError


class ControllerError(EnginehouseError):
    """The controller cannot place, start, dispatch or collect something."""


class ClusterLost(ControllerError):
    """Ray's control service is gone: nothing can be started any more, and Ray soon ends every program on it."""


class PlacementError(ControllerError):
    """The cluster cannot give a resource pool, or not within the deadline."""


class DispatchError(ControllerError):
    """Arguments cannot be split over a group, or results cannot be put together."""


class GroupClosed(ControllerError):
    """A call went to a worker group that was shut down or is broken; `reason` states the cause."""

    def __init__(self, message: str, reason: str = ""):
        super().__init__(message)
        self.reason = reason

    def __reduce__(self):
        return type(self), (str(self), self.reason)


class DataLost(ControllerError):
    """Rows of a distributed batch cannot be read any more: their node left, or they were freed.

    Attributes:
        origin: role, rank, node and method they came from.
    """

    def __init__(self, message: str, origin: str = ""):
        super().__init__(message)
        self.origin = origin

    def __reduce__(self):
        return type(self), (str(self), self.origin)


class WorkerError(ControllerError):
    """A call failed on a worker.

    Attributes:
        role: name of the worker group.
        rank: the worker's rank in it.
        node: address of its node.
        pid: its process id.
        method: the method called; `__init__` while it was being built.
        log_lines: the worker's last log lines, oldest first.
    """

    def __init__(
        self,
        message: str,
        *,
        role: str = "",
        rank: int = 0,
        node: str = "",
        pid: int = 0,
        method: str = "",
        log_lines: Sequence[str] = (),
    ):
        super().__init__(message)
        self.role = role
        self.rank = rank
        self.node = node
        self.pid = pid
        self.method = method
        self.log_lines = tuple(log_lines)

    def __reduce__(self):
        return _restore, (type(self), str(self), self.__dict__)


class WorkerDied(WorkerError):
    """The worker's process ended: killed, out of memory, a crash in native code."""


class WorkerTimeout(WorkerError):
    """The call did not end within its deadline.

    Attributes:
        seconds: the deadline.
        stacks: for each late rank, the Python stacks of all its threads and of its running coroutines, or why there
            are none. `rank` is the first of them.
    """

    seconds: float = 0.0
    stacks: Mapping[int, str] = {}


class RemoteError(WorkerError):
    """The call raised on the worker.

    Attributes:
        cause: the exception that was raised, where it could be brought here; else None.
        type_name: its type's name.
        traceback_text: the worker's traceback.
    """

    cause: BaseException | None = None
    type_name: str = ""
    traceback_text: str = ""

    def __reduce__(self):
        cause = None if self.cause is None else pickled_error(self.cause)
        return _restore, (type(self), str(self), self.__dict__ | {"cause": None}, cause)


class RemoteTraceback(Exception):
    """Carries a worker's traceback text, as the `__cause__` of a `RemoteError`: Python prints it first."""

    def __str__(self) -> str:
        return "\n" + str(self.args[0]) if self.args else ""


def _restore(kind: type[WorkerError], message: str, state: dict[str, Any], cause: bytes | None = None) -> WorkerError:
    error = kind(message)
    error.__dict__.update(state)
    if isinstance(error, RemoteError):
        error.cause = unpickled_error(cause)
        if error.traceback_text:
            error.__cause__ = RemoteTraceback(error.traceback_text)
    return error


def pickled_error(error: BaseException) -> bytes | None:
    """Pickle an exception; None if it does not unpickle, as where its constructor takes other arguments."""
    from ray import cloudpickle

    try:
        pickled: bytes = cloudpickle.dumps(error)
        cloudpickle.loads(pickled)
    except Exception:
        return None
    return pickled


def unpickled_error(pickled: bytes | None) -> BaseException | None:
    """Return the exception that `pickled_error` packed; None where its class cannot be imported here."""
    if not pickled:
        return None
    from ray import cloudpickle

    try:
        error = cloudpickle.loads(pickled)
    except Exception:
        return None
    return error if isinstance(error, BaseException) else None


def unwrap_user_error(error: BaseException | None) -> UserError | None:
    """Find the `UserError` behind an error, also one raised on a worker; None if the user is not to blame.

    The command line exits with code 2 and the `UserError`'s message where there is one, else with code 1.
    """
    causes = list(walk_causes(error))
    if any(isinstance(cause, SaveError) for cause in causes):
        return None
    return next((cause for cause in causes if isinstance(cause, UserError)), None)


def keeps_state(error: BaseException | None) -> bool:
    """Return True if the actor's state is worth saving after an error: no cause of it says that it is not."""
    return all(getattr(cause, "keeps_state", True) for cause in walk_causes(error))


def walk_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Iterate over an error and its causes, here and on a worker, and over the members of exception groups."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        current = waiting.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        waiting += [current.__cause__, getattr(current, "cause", None)]
        if isinstance(current, BaseExceptionGroup):
            waiting += current.exceptions
