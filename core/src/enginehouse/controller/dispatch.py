"""Turns a call of a group into one call per rank, with a built-in dispatch mode (`plugin.py`) or a plugin's mode."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from enginehouse.controller.collect import collect
from enginehouse.controller.errors import DispatchError
from enginehouse.controller.registration import CallSpec
from enginehouse.controller.shards import Shard

if TYPE_CHECKING:
    from enginehouse.controller.group import WorkerGroup

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of one rank."""


class PerRank:
    """One value per rank, for `all_to_all` calls, which also accept a plain list."""

    def __init__(self, values: Sequence[Any]):
        self.values = list(values)


class Same:
    """One value for all ranks, for `all_to_all` calls."""

    def __init__(self, value: Any):
        self.value = value


class Balanced:
    """A batch for a `dp` call whose rows are split so that the shards have similar numbers of tokens.

    Concatenated results have the order of the batch's rows. This holds for lists and tensors with one entry per row,
    and for batches with the same number of consecutive rows for each row, such as the responses to a prompt.
    `collect="list"` and collect functions get the results in the order of ranks.

    Args:
        batch: a `Batch`, a `DistributedBatch`, or the `Future` of one.
        by: name of the ragged column whose lengths are balanced.
    """

    def __init__(self, batch: Any, by: str):
        self.batch = batch
        self.by = by


class Dealt(list[Call | None]):
    """The calls of all ranks for a `Balanced` batch.

    Attributes:
        shards: for each shard, the indices of the batch's rows that are in the shard, int64.
    """

    def __init__(self, calls: Sequence[Call | None], shards: Sequence[np.ndarray]):
        super().__init__(calls)
        self.shards = shards


@dataclass(frozen=True, slots=True)
class Mode:
    """A dispatch mode with its collection, as a group uses it.

    Attributes:
        dispatch: `dispatch(group, *args, **kwargs)` returns one `Call` per rank, or None for a rank that is not called.
        collect: `collect(group, outputs, ranks)` gets one output per rank, and the ranks whose results come back.
        returning: returns the ranks whose results `collect` reads. Results of other ranks stay on their workers. None:
            `collect` reads the results of all ranks.
        passes_on: True if `collect` returns the output of one rank unchanged. So a placeholder can stand for the output
            in the arguments of other calls.
        awaits_futures: True if `dispatch` gets the results of `Future`s among the arguments.
        keeps_back: True if batches among the results stay on their workers. `collect` then gets a `Shard` for each.
        joins: True if `collect` concatenates the ranks' results.
    """

    dispatch: Callable[..., Sequence[Call | None]]
    collect: Callable[[WorkerGroup, list[Any], Sequence[int]], Any]
    returning: Callable[[WorkerGroup], Sequence[int]] | None = None
    passes_on: bool = False
    awaits_futures: bool = False
    keeps_back: bool = False
    joins: bool = False


def one_to_all(group: WorkerGroup, *args: Any, **kwargs: Any) -> list[Call | None]:
    """Give every rank the same arguments."""
    return [(args, kwargs)] * group.world_size


def rank_zero(group: WorkerGroup, *args: Any, **kwargs: Any) -> list[Call | None]:
    """Call rank 0 only."""
    calls: list[Call | None] = [None] * group.world_size
    calls[0] = (args, kwargs)
    return calls


def all_to_all(group: WorkerGroup, *args: Any, **kwargs: Any) -> list[Call | None]:
    """Give each rank one entry of each argument. Raises `DispatchError` unless each argument has `world_size`
    entries."""
    size = group.world_size
    spread_args = [_per_rank(value, f"argument {index}", size) for index, value in enumerate(args)]
    spread_kwargs = {name: _per_rank(value, f"argument {name!r}", size) for name, value in kwargs.items()}
    return [
        (tuple(values[rank] for values in spread_args), {name: values[rank] for name, values in spread_kwargs.items()})
        for rank in range(size)
    ]


def dp(group: WorkerGroup, *args: Any, **kwargs: Any) -> list[Call | None]:
    """Give each data-parallel replica a shard of each batch, and every rank all other arguments. Raises `DispatchError`
    if batches differ in length, several arguments are `Balanced`, or the mesh does not fit the group."""
    layout = group.layout
    deal = _deal([*args, *kwargs.values()], layout.shards)
    args = tuple(value.batch if isinstance(value, Balanced) else value for value in args)
    kwargs = {name: value.batch if isinstance(value, Balanced) else value for name, value in kwargs.items()}
    batches = {index: value for index, value in enumerate(args) if is_splittable(value)}
    named = {name: value for name, value in kwargs.items() if is_splittable(value)}
    lengths = {f"argument {index}": len(batch) for index, batch in batches.items()}
    lengths |= {f"argument {name!r}": len(batch) for name, batch in named.items()}
    if len(set(lengths.values())) > 1:
        raise DispatchError(f"batches of different lengths cannot be split together: {lengths} rows")

    def cut(batch: Any) -> list[Any]:
        return batch.split(layout.shards) if deal is None else [batch.take(rows) for rows in deal]

    split = {index: cut(batch) for index, batch in batches.items()}
    split_named = {name: cut(batch) for name, batch in named.items()}
    shard_calls: list[Call | None] = [
        (
            tuple(split[index][shard] if index in split else value for index, value in enumerate(args)),
            {name: split_named[name][shard] if name in split_named else value for name, value in kwargs.items()},
        )
        for shard in range(layout.shards)
    ]
    calls = [shard_calls[shard] for shard in layout.shard_of]
    return calls if deal is None else Dealt(calls, deal)


def _deal(values: Sequence[Any], shards: int) -> list[np.ndarray] | None:
    wrappers = [value for value in values if isinstance(value, Balanced)]
    if not wrappers:
        return None
    if len(wrappers) > 1:
        raise DispatchError(
            "only one argument of a call can be Balanced, because it determines the rows that each rank gets of every "
            "batch in the call"
        )
    if not is_splittable(wrappers[0].batch):
        raise DispatchError(f"Balanced must wrap a batch, not {type(wrappers[0].batch).__name__}")
    if shards == 1:
        return None
    from enginehouse.data import balance

    return balance(wrappers[0].batch.lengths(wrappers[0].by), shards)


def restore_order(result: Any, parts: Sequence[Any], shards: Sequence[np.ndarray]) -> Any:
    """Put a result back into the order of the rows of a `Balanced` batch.

    A list or tensor is reordered if it has one entry for each row, and otherwise returned unchanged. A batch must have
    the same number of rows for each row of the `Balanced` batch.

    Raises:
        DispatchError: the rows of a returned batch cannot be matched with those of the `Balanced` batch.
    """
    entries, sizes = [_entries(part) for part in parts], [len(rows) for rows in shards]
    back = np.argsort(np.concatenate(shards))
    if is_splittable(result):
        times = len(result) // len(back) if len(back) else 1
        if entries != [times * size for size in sizes]:
            raise DispatchError(
                f"a Balanced batch of {len(back)} rows was split into {sizes} rows, but came back as {entries} rows: "
                "the method must return the same number of rows for each row of a Balanced batch"
            )
        return result.take((back[:, None] * times + np.arange(times)).ravel())
    if entries != sizes:
        return result
    if isinstance(result, (list, tuple)):
        return type(result)(result[row] for row in back)
    torch = sys.modules.get("torch")
    if isinstance(result, np.ndarray) or (torch is not None and isinstance(result, torch.Tensor)):
        return result[back]
    return result


def _entries(part: Any) -> int | None:
    if isinstance(part, Shard):
        return part.facts.rows
    with contextlib.suppress(TypeError):  # a 0-d tensor or array has a __len__ that raises
        return len(part)
    return None


def is_splittable(value: Any) -> bool:
    """Return True if `dp` splits `value`: its class has a length, `split(parts)` and `concat`. Tensors do not have all
    three."""
    kind = type(value)
    return hasattr(kind, "split") and hasattr(kind, "concat") and hasattr(kind, "__len__")


def refuse_wrapper(value: Any, call: str) -> None:
    """Raise a `DispatchError` for a wrapper that the dispatch mode of the call does not unwrap."""
    if isinstance(value, (PerRank, Same)):
        raise DispatchError(
            f"{call} got a {type(value).__name__}, which only calls of mode 'all_to_all' accept; other modes give a "
            "plain value to every rank"
        )
    if isinstance(value, Balanced):
        raise DispatchError(f"{call} got a Balanced batch, which only calls of mode 'dp' accept; pass the batch")


def is_distributed(value: Any) -> bool:
    """Return True for a `DistributedBatch`, without importing its module."""
    module = sys.modules.get("enginehouse.controller.distributed")
    return module is not None and isinstance(value, module.DistributedBatch)


def output_ranks(group: WorkerGroup) -> Sequence[int]:
    """Return the rank that returns the results of each data shard, in the order of the shards."""
    return group.layout.output_ranks


def resolve_mode(spec: CallSpec) -> Mode:
    """Return the mode with which a method was registered: a mode that a plugin declares, or a mode made of the two
    functions given to `@register`.

    Raises:
        PluginLookupError: no plugin registered a mode of this name.
        ResolveError: a function of the mode cannot be imported.
    """
    if isinstance(spec.dispatch, Mapping):
        gather = spec.collect or spec.dispatch["collect_fn"]
        return _make_mode(spec.dispatch["dispatch_fn"], gather, None, awaits_futures=False)
    from enginehouse.plugin import DispatchMode, plugins, resolve
    from enginehouse.plugin.records import COLLECT_RULES

    record = plugins().get(DispatchMode, spec.dispatch)
    gather = spec.collect or (record.collect if record.collect in COLLECT_RULES else resolve(record.collect))
    # a function given with the method gets one output a rank
    returning = resolve(record.returning) if record.returning and not callable(spec.collect) else None
    return _make_mode(resolve(record.dispatch), gather, returning, record.awaits_futures)


def _make_mode(
    dispatch: Callable[..., Any],
    gather: str | Callable[..., Any],
    returning: Callable[..., Any] | None,
    awaits_futures: bool,
) -> Mode:
    if callable(gather):
        return Mode(dispatch, lambda group, outputs, ranks: gather(group, outputs), returning, False, awaits_futures)

    def by_rule(group: WorkerGroup, outputs: list[Any], ranks: Sequence[int]) -> Any:
        return collect(gather, [outputs[rank] for rank in ranks], ranks, group.name)

    return Mode(
        dispatch,
        by_rule,
        returning,
        passes_on=gather == "first",
        awaits_futures=awaits_futures,
        keeps_back=gather == "distributed",
        joins=gather in ("concat", "distributed"),
    )


def _per_rank(value: Any, label: str, size: int) -> Sequence[Any]:
    if isinstance(value, Same):
        return [value.value] * size
    values = value.values if isinstance(value, PerRank) else value
    if not isinstance(values, (list, tuple)):
        raise DispatchError(
            f"{label} of an all_to_all call must be a list with one entry per rank, not {type(value).__name__}; "
            "use Same(value) to give every rank the same value"
        )
    if len(values) != size:
        raise DispatchError(f"{label} of an all_to_all call has {len(values)} entries for {size} ranks")
    return values
