"""How a call's arguments become one call a rank: the built-in modes, and how custom and plugins' modes are found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from enginehouse.controller.collect import collect
from enginehouse.controller.errors import DispatchError
from enginehouse.controller.registration import CallSpec

if TYPE_CHECKING:
    from enginehouse.controller.group import WorkerGroup

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of one rank."""


class PerRank:
    """One value a rank, for `all_to_all` calls: says what a plain list says, explicitly."""

    def __init__(self, values: Sequence[Any]):
        self.values = list(values)


class Same:
    """One value for every rank, for `all_to_all` calls."""

    def __init__(self, value: Any):
        self.value = value


@dataclass(frozen=True, slots=True)
class Mode:
    """A dispatch mode with its collection, ready to be used by a group.

    Attributes:
        dispatch: `dispatch(group, *args, **kwargs)` returns one `Call` a rank, None for a rank that is not called.
        collect: `collect(group, outputs, ranks)` with one output a rank and the ranks that answer.
        returning: ranks whose results the collection reads, or None for all: the others' stay where they are.
        passes_on: whether the collection gives one rank's output as it is, so that a reference can stand for it.
    """

    dispatch: Callable[..., Sequence[Call | None]]
    collect: Callable[[WorkerGroup, list[Any], Sequence[int]], Any]
    returning: Callable[[WorkerGroup], Sequence[int]] | None = None
    passes_on: bool = False


def one_to_all(group: WorkerGroup, *args: Any, **kwargs: Any) -> list[Call | None]:
    """The same arguments for every rank."""
    return [(args, kwargs)] * group.world_size


def rank_zero(group: WorkerGroup, *args: Any, **kwargs: Any) -> list[Call | None]:
    """Rank 0 alone."""
    calls: list[Call | None] = [None] * group.world_size
    calls[0] = (args, kwargs)
    return calls


def all_to_all(group: WorkerGroup, *args: Any, **kwargs: Any) -> list[Call | None]:
    """One entry of each argument for each rank.

    Raises:
        DispatchError: an argument is not a list of `world_size` entries.
    """
    size = group.world_size
    spread_args = [_per_rank(value, f"argument {index}", size) for index, value in enumerate(args)]
    spread_kwargs = {name: _per_rank(value, f"argument {name!r}", size) for name, value in kwargs.items()}
    return [
        (tuple(values[rank] for values in spread_args), {name: values[rank] for name, values in spread_kwargs.items()})
        for rank in range(size)
    ]


def dp(group: WorkerGroup, *args: Any, **kwargs: Any) -> list[Call | None]:
    """A shard of each batch for each data-parallel replica; everything else for every rank.

    Raises:
        DispatchError: batches of different lengths, or a mesh that does not fit the group.
    """
    layout = group.layout
    batches = {index: value for index, value in enumerate(args) if is_splittable(value)}
    named = {name: value for name, value in kwargs.items() if is_splittable(value)}
    lengths = {f"argument {index}": len(batch) for index, batch in batches.items()}
    lengths |= {f"argument {name!r}": len(batch) for name, batch in named.items()}
    if len(set(lengths.values())) > 1:
        raise DispatchError(f"batches of different lengths cannot be split together: {lengths} rows")
    split = {index: batch.split(layout.shards) for index, batch in batches.items()}
    split_named = {name: batch.split(layout.shards) for name, batch in named.items()}
    of_shard: list[Call] = [
        (
            tuple(split[index][shard] if index in split else value for index, value in enumerate(args)),
            {name: split_named[name][shard] if name in split_named else value for name, value in kwargs.items()},
        )
        for shard in range(layout.shards)
    ]
    return [of_shard[shard] for shard in layout.shard_of]


def is_splittable(value: Any) -> bool:
    """Whether `dp` splits an argument: a batch has a length, `split(parts)` and `concat`; a tensor does not."""
    kind = type(value)
    return hasattr(kind, "split") and hasattr(kind, "concat") and hasattr(kind, "__len__")


def resolve_mode(spec: CallSpec) -> Mode:
    """The mode a method was registered with.

    Raises:
        PluginLookupError: no plugin registered a mode of that name.
    """
    if isinstance(spec.dispatch, Mapping):
        return _custom(spec.dispatch["dispatch_fn"], spec.dispatch["collect_fn"], spec.collect)
    builtin = _BUILTIN.get(spec.dispatch)
    if builtin is None:
        from enginehouse.plugin import DispatchMode, plugins, resolve

        record = plugins().get(DispatchMode, spec.dispatch)
        return _custom(resolve(record.dispatch), resolve(record.collect), spec.collect)
    function, rule, returning = builtin
    if callable(spec.collect):
        return _custom(function, spec.collect, None)
    rule = spec.collect or rule
    return Mode(function, _by_rule(rule), returning, passes_on=rule == "first")


def _custom(
    dispatch: Callable[..., Any], gather: Callable[..., Any], override: str | Callable[..., Any] | None
) -> Mode:
    if isinstance(override, str):
        return Mode(dispatch, _by_rule(override))
    function = override or gather
    return Mode(dispatch, lambda group, outputs, ranks: function(group, outputs))


def _by_rule(rule: str) -> Callable[..., Any]:
    return lambda group, outputs, ranks: collect(rule, [outputs[rank] for rank in ranks], ranks, group.name)


def _output_ranks(group: WorkerGroup) -> Sequence[int]:
    return group.layout.output_ranks


_BUILTIN: dict[str, tuple[Callable[..., Any], str, Callable[..., Any] | None]] = {
    "one_to_all": (one_to_all, "list", None),
    "rank_zero": (rank_zero, "first", None),
    "all_to_all": (all_to_all, "list", None),
    "dp": (dp, "concat", _output_ranks),
}


def _per_rank(value: Any, label: str, size: int) -> Sequence[Any]:
    if isinstance(value, Same):
        return [value.value] * size
    values = value.values if isinstance(value, PerRank) else value
    if not isinstance(values, (list, tuple)):
        raise DispatchError(
            f"{label} of an all_to_all call is a list with one entry a rank, not {type(value).__name__}; "
            "wrap a value for every rank in Same(value)"
        )
    if len(values) != size:
        raise DispatchError(f"{label} of an all_to_all call has {len(values)} entries for {size} ranks")
    return values
