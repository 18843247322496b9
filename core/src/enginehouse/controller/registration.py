"""`@register` marks a method of a worker with the way in which its group calls it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any, TypeVar, overload

from enginehouse.plugin.records import COLLECT_RULES

F = TypeVar("F", bound=Callable[..., Any])

MARK = "__enginehouse_call__"


class Dispatch(StrEnum):
    """The built-in dispatch modes. Plain strings work as well."""

    ONE_TO_ALL = "one_to_all"
    ALL_TO_ALL = "all_to_all"
    RANK_ZERO = "rank_zero"
    DP = "dp"


class Execute(StrEnum):
    """The ranks that execute a call. Plain strings work as well."""

    ALL = "all"
    RANK_ZERO = "rank_zero"


@dataclass(frozen=True, slots=True)
class CallSpec:
    """The arguments of `@register`. See `register` for their meaning."""

    dispatch: str | Mapping[str, Callable[..., Any]] = "one_to_all"
    collect: str | Callable[..., Any] | None = None
    execute: str = "all"
    blocking: bool = True
    timeout: float | None = None
    urgent: bool = False


@overload
def register(dispatch: F) -> F: ...
@overload
def register(
    dispatch: str | Mapping[str, Callable[..., Any]] = ...,
    *,
    collect: str | Callable[..., Any] | None = ...,
    execute: str = ...,
    blocking: bool = ...,
    timeout: float | None = ...,
    urgent: bool = ...,
) -> Callable[[F], F]: ...
def register(
    dispatch: Any = "one_to_all",
    *,
    collect: str | Callable[..., Any] | None = None,
    execute: str = "all",
    blocking: bool = True,
    timeout: float | None = None,
    urgent: bool = False,
) -> Any:
    """Make a method of a worker callable on its group as `group.method(...)`.

    Args:
        dispatch: mode by which arguments reach the ranks.
            - `"one_to_all"`: every rank gets the same arguments.
            - `"rank_zero"`: only rank 0 is called.
            - `"all_to_all"`: each argument is a list (or `PerRank`) with one entry per rank; `Same(value)` goes to all.
            - `"dp"`: batches are split over the data axis of the workers' meshes. All ranks of a model-parallel replica
              get the same shard. Other arguments go to every rank. Only output ranks return results. Never write into a
              column of the batch in place: torch has no read-only tensors, and every reader would see the change. Write
              into `batch.clone()` instead.
            - `{"dispatch_fn": f, "collect_fn": g}`: `f(group, *args, **kwargs)` returns one `(args, kwargs)` per rank,
              or None for a rank that is not called. `g(group, outputs)` gets one output per rank, or None.
            - any other name: a dispatch mode of a plugin, which the controller looks up at the first call.
        collect: rule that combines results: `"list"`, `"first"`, `"concat"` (batches, lists, arrays; None if all are
            None), `"distributed"` (batches stay on the workers and make a `DistributedBatch`; other results as
            `"concat"`), `"merge"` (dicts of metrics: `enginehouse.engines.Mean`s are added up; of plain floats only the
            value of the last rank is kept, so return `Mean`s), or `g(group, outputs)`. By default `one_to_all` and
            `all_to_all` return a list, `dp` uses `"distributed"`, and `rank_zero` returns the result of rank 0.
        execute: `"rank_zero"` calls only rank 0, with the arguments that the dispatch gives it.
        blocking: False returns a `Future`.
        timeout: deadline in seconds; None: the default of the group.
        urgent: True for an async method that must run even if many other async calls wait. Urgent calls have a separate
            lane.
    """
    if inspect.isfunction(dispatch):
        return register()(dispatch)
    if isinstance(dispatch, Mapping):
        if set(dispatch) != {"dispatch_fn", "collect_fn"}:
            raise ValueError(
                f"a dispatch mode as a dict must have the keys 'dispatch_fn' and 'collect_fn', not {list(dispatch)}"
            )
    elif not isinstance(dispatch, str):
        raise TypeError(
            f"dispatch must be the name of a mode or a dict of two functions, not {type(dispatch).__name__}"
        )
    if not (collect is None or callable(collect) or collect in COLLECT_RULES):
        raise ValueError(f"collect must be one of {', '.join(COLLECT_RULES)}, or a function, not {collect!r}")
    if isinstance(dispatch, str):
        dispatch = str(dispatch.value if isinstance(dispatch, Enum) else dispatch)
    if dispatch == "dp" and Execute(execute) is Execute.RANK_ZERO:
        raise ValueError("dispatch='dp' with execute='rank_zero' would lose all rows except the shard of rank 0")
    spec = CallSpec(dispatch, collect, Execute(execute).value, blocking, timeout, urgent)

    def mark(function: F) -> F:
        if urgent and not inspect.iscoroutinefunction(function):
            raise TypeError(f"{function.__qualname__} cannot be urgent, because it is not async")
        setattr(function, MARK, spec)
        return function

    return mark


def registered_methods(cls: type) -> dict[str, CallSpec]:
    """Return the registered methods of a class. An override without the decorator keeps the spec of its parent."""
    specs: dict[str, CallSpec] = {}
    for parent in reversed(cls.__mro__):
        for name, member in vars(parent).items():
            spec = getattr(member, MARK, None)
            if spec is not None:
                specs[name] = spec
    return specs


def is_async(cls: type, method: str) -> bool:
    """Return True if a method runs on the worker's event loop."""
    return inspect.iscoroutinefunction(getattr(cls, method, None))
