"""What can go wrong between the controller and its workers, each error naming role, rank, node, pid and method.

All errors here pickle, so that a controller may itself run inside a Ray task or job.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from enginehouse.errors import EnginehouseError, SaveError, UserError


class ControllerError(EnginehouseError):
    """Something the controller cannot do: place, start, dispatch, collect."""


class ClusterLost(ControllerError):
    """Ray's control service is gone: nothing can be started any more, and Ray soon ends every program on it."""


class PlacementError(ControllerError):
    """A resource pool that the cluster cannot give, or not within the deadline."""


class DispatchError(ControllerError):
    """Arguments that cannot be split over a group, or results that cannot be put together."""


class GroupClosed(ControllerError):
    """A call to a worker group that was shut down, or that is broken: `reason` says by what."""

    def __init__(self, message: str, reason: str = ""):
        super().__init__(message)
        self.reason = reason

    def __reduce__(self):
        return type(self), (str(self), self.reason)


class DataLost(ControllerError):
    """Rows of a distributed batch that cannot be read any more: their node left, or they were freed.

    Attributes:
        origin: role, rank, node and method they came from.
    """

    def __init__(self, message: str, origin: str = ""):
        super().__init__(message)
        self.origin = origin

    def __reduce__(self):
        return type(self), (str(self), self.origin)


class WorkerError(ControllerError):
    """A call that failed on a worker.

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
        state = {name: value for name, value in self.__dict__.items() if name != "cause"}
        cause = None if self.cause is None else pickled_error(self.cause)
        return _restore_remote, (type(self), str(self), state, cause)


class RemoteTraceback(Exception):
    """Carries a worker's traceback text, as the `__cause__` of a `RemoteError`: Python prints it first."""

    def __str__(self) -> str:
        return "\n" + str(self.args[0]) if self.args else ""


def _restore(kind: type[WorkerError], message: str, state: dict[str, Any]) -> WorkerError:
    error = kind(message)
    error.__dict__.update(state)
    return error


def _restore_remote(kind: type[RemoteError], message: str, state: dict[str, Any], cause: bytes | None) -> RemoteError:
    error = kind(message)
    error.__dict__.update(state)
    error.cause = unpickled_error(cause)
    if error.traceback_text:
        error.__cause__ = RemoteTraceback(error.traceback_text)
    return error


def pickled_error(error: BaseException) -> bytes | None:
    """Pickle an exception, if it also unpickles (one whose constructor takes other arguments does not)."""
    from ray import cloudpickle

    try:
        pickled: bytes = cloudpickle.dumps(error)
        cloudpickle.loads(pickled)
    except Exception:
        return None
    return pickled


def unpickled_error(pickled: bytes | None) -> BaseException | None:
    """The exception that `pickled_error` gave; None where its class is not importable here: the text says it all."""
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
    errors = list(walk_causes(error))
    if any(isinstance(one, SaveError) for one in errors):
        return None
    return next((one for one in errors if isinstance(one, UserError)), None)


def keeps_state(error: BaseException | None) -> bool:
    """Whether the actor's state is worth saving after an error: nothing behind it says that it is not."""
    return all(getattr(one, "keeps_state", True) for one in walk_causes(error))


def walk_causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what caused it, here and on a worker; of a group of errors each."""
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
