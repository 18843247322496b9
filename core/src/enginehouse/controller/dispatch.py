"""How a call's arguments become one call a rank: the built-in modes (declared in `plugin.py`) and finding any."""

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
        awaits_futures: whether `dispatch` gets the results of `Future`s among the arguments.
    """

    dispatch: Callable[..., Sequence[Call | None]]
    collect: Callable[[WorkerGroup, list[Any], Sequence[int]], Any]
    returning: Callable[[WorkerGroup], Sequence[int]] | None = None
    passes_on: bool = False
    awaits_futures: bool = False


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


def output_ranks(group: WorkerGroup) -> Sequence[int]:
    """The ranks that answer for the shards of the data axis, in the shards' order."""
    return group.layout.output_ranks


def resolve_mode(spec: CallSpec) -> Mode:
    """The mode a method was registered with: the record of that name, or the two functions given in place.

    Raises:
        PluginLookupError: no plugin registered a mode of that name.
        ResolveError: a function of the mode is not there.
    """
    if isinstance(spec.dispatch, Mapping):
        gather = spec.collect or spec.dispatch["collect_fn"]
        return _mode(spec.dispatch["dispatch_fn"], gather, None, awaits_futures=False)
    from enginehouse.plugin import DispatchMode, plugins, resolve
    from enginehouse.plugin.records import COLLECT_RULES

    record = plugins().get(DispatchMode, spec.dispatch)
    gather = spec.collect or (record.collect if record.collect in COLLECT_RULES else resolve(record.collect))
    # a function given with the method gets one output a rank
    returning = resolve(record.returning) if record.returning and not callable(spec.collect) else None
    return _mode(resolve(record.dispatch), gather, returning, record.awaits_futures)


def _mode(
    dispatch: Callable[..., Any],
    gather: str | Callable[..., Any],
    returning: Callable[..., Any] | None,
    awaits_futures: bool,
) -> Mode:
    if callable(gather):
        return Mode(dispatch, lambda group, outputs, ranks: gather(group, outputs), returning, False, awaits_futures)

    def by_rule(group: WorkerGroup, outputs: list[Any], ranks: Sequence[int]) -> Any:
        return collect(gather, [outputs[rank] for rank in ranks], ranks, group.name)

    return Mode(dispatch, by_rule, returning, gather == "first", awaits_futures)


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
