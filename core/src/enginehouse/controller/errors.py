"""Errors of the controller and its workers. All of them can be pickled, because a controller may run in a Ray task."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from enginehouse.errors import EnginehouseError, SaveError, UserError


class ControllerError(EnginehouseError):
    """The controller cannot place, start, dispatch or collect something."""


class ClusterLost(ControllerError):
    """Ray's control service has ended. No process can start any more, and Ray soon ends all programs of the cluster."""


class PlacementError(ControllerError):
    """The cluster cannot provide the resources of a pool, or did not provide them within the deadline."""


class DispatchError(ControllerError):
    """Arguments cannot be split over a group, or results cannot be combined."""


class GroupClosed(ControllerError):
    """A call went to a worker group that was shut down or is broken; `reason` states the cause."""

    def __init__(self, message: str, reason: str = ""):
        super().__init__(message)
        self.reason = reason

    def __reduce__(self):
        return type(self), (str(self), self.reason)


class DataLost(ControllerError):
    """Rows of a distributed batch cannot be read any more, because the node that held them has left the cluster, or
    because the rows were freed.

    Attributes:
        origin: role, rank, node and method that made the rows.
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
        rank: rank of the worker in the group.
        node: address of the worker's node.
        pid: process id of the worker.
        method: the called method; `__init__` if the worker was being built.
        log_lines: last log lines of the worker, oldest first.
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
    """The worker's process ended, for example because it was killed, ran out of memory or crashed in native code."""


class WorkerTimeout(WorkerError):
    """The call did not end within its deadline.

    Attributes:
        stacks: for each late rank, the Python stacks of all its threads and running coroutines, or the reason why they
            are missing. `rank` is the first late rank.
    """

    seconds: float = 0.0
    stacks: Mapping[int, str] = {}


class RemoteError(WorkerError):
    """The call raised on the worker.

    Attributes:
        cause: the raised exception; None if it could not be unpickled here.
    """

    cause: BaseException | None = None
    type_name: str = ""
    traceback_text: str = ""

    def __reduce__(self):
        cause = None if self.cause is None else pickled_error(self.cause)
        return _restore, (type(self), str(self), self.__dict__ | {"cause": None}, cause)


class RemoteTraceback(Exception):
    """Carries a worker's traceback text as the `__cause__` of a `RemoteError`, so that Python prints the text first."""

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
    """Pickle an exception; return None if it does not unpickle, for example because of its constructor's arguments."""
    from ray import cloudpickle

    try:
        pickled: bytes = cloudpickle.dumps(error)
        cloudpickle.loads(pickled)
    except Exception:
        return None
    return pickled


def unpickled_error(pickled: bytes | None) -> BaseException | None:
    """Return the exception that `pickled_error` pickled; None if its class cannot be imported here."""
    if not pickled:
        return None
    from ray import cloudpickle

    try:
        error = cloudpickle.loads(pickled)
    except Exception:
        return None
    return error if isinstance(error, BaseException) else None


def unwrap_user_error(error: BaseException | None) -> UserError | None:
    """Find the `UserError` among the causes of an error, in this process or on a worker. Return None if there is none,
    or if a `SaveError` is among the causes. The command line prints the `UserError` and exits with code 2, or with
    code 1 if there is none."""
    causes = list(walk_causes(error))
    if any(isinstance(cause, SaveError) for cause in causes):
        return None
    return next((cause for cause in causes if isinstance(cause, UserError)), None)


def keeps_state(error: BaseException | None) -> bool:
    """Return True if the actor's state is worth saving after an error, because no cause has `keeps_state` False."""
    return all(getattr(cause, "keeps_state", True) for cause in walk_causes(error))


def walk_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, its causes in this process and on a worker, and the members of exception groups."""
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
