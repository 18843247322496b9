"""How a call's arguments become one call a rank: the built-in modes (declared in `plugin.py`) and finding any."""

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
    """One value a rank, for `all_to_all` calls: says what a plain list says, explicitly."""

    def __init__(self, values: Sequence[Any]):
        self.values = list(values)


class Same:
    """One value for every rank, for `all_to_all` calls."""

    def __init__(self, value: Any):
        self.value = value


class Balanced:
    """A batch for a `dp` call whose rows are dealt to the shards by tokens instead of in equal counts.

    Joined results come back in the order of the rows given: lists and tensors with one entry for each row, batches with
    the same number of rows for each (answers to a prompt, next to each other). `collect="list"` and collect functions
    get what the ranks return as it is.

    Args:
        batch: a `Batch`, a `DistributedBatch`, or the `Future` of one.
        by: the ragged column whose lengths count.
    """

    def __init__(self, batch: Any, by: str):
        self.batch = batch
        self.by = by


class Dealt(list[Call | None]):
    """One call a rank, where rows were not cut in the order given.

    Attributes:
        shards: the rows given that each shard holds, int64.
    """

    def __init__(self, calls: Sequence[Call | None], shards: Sequence[np.ndarray]):
        super().__init__(calls)
        self.shards = shards


@dataclass(frozen=True, slots=True)
class Mode:
    """A dispatch mode with its collection, ready to be used by a group.

    Attributes:
        dispatch: `dispatch(group, *args, **kwargs)` returns one `Call` a rank, None for a rank that is not called.
        collect: `collect(group, outputs, ranks)` with one output a rank and the ranks that answer.
        returning: ranks whose results the collection reads, or None for all: the others' stay where they are.
        passes_on: whether the collection gives one rank's output as it is, so that a reference can stand for it.
        awaits_futures: whether `dispatch` gets the results of `Future`s among the arguments.
        keeps_back: whether batches among the results stay where they are; `collect` then gets a `Shard` for each.
        joins: whether the collection puts what the ranks return end to end.
    """

    dispatch: Callable[..., Sequence[Call | None]]
    collect: Callable[[WorkerGroup, list[Any], Sequence[int]], Any]
    returning: Callable[[WorkerGroup], Sequence[int]] | None = None
    passes_on: bool = False
    awaits_futures: bool = False
    keeps_back: bool = False
    joins: bool = False


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
        DispatchError: batches of different lengths, several `Balanced`, or a mesh that does not fit the group.
    """
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
    of_shard: list[Call | None] = [
        (
            tuple(split[index][shard] if index in split else value for index, value in enumerate(args)),
            {name: split_named[name][shard] if name in split_named else value for name, value in kwargs.items()},
        )
        for shard in range(layout.shards)
    ]
    calls = [of_shard[shard] for shard in layout.shard_of]
    return calls if deal is None else Dealt(calls, deal)


def _deal(values: Sequence[Any], shards: int) -> list[np.ndarray] | None:
    """The rows of each of several shards where one of the arguments is `Balanced`, else None."""
    asked = [value for value in values if isinstance(value, Balanced)]
    if not asked:
        return None
    if len(asked) > 1:
        raise DispatchError("one argument of a call can be Balanced: the other batches are dealt as it is")
    if not is_splittable(asked[0].batch):
        raise DispatchError(f"Balanced goes around a batch, not {type(asked[0].batch).__name__}")
    if shards == 1:
        return None
    from enginehouse.data import balance

    return balance(asked[0].batch.lengths(asked[0].by), shards)


def restore_order(result: Any, parts: Sequence[Any], shards: Sequence[np.ndarray]) -> Any:
    """Put a result back into the order of the rows given, where each part has one entry for each row of its shard.

    Batches may also have k rows for each row given, next to each other, as answers to a prompt.

    Args:
        result: the parts, joined.
        parts: what the shards' ranks returned.
        shards: the rows given that each shard holds.

    Raises:
        DispatchError: a batch whose rows do not follow from the rows given: their order would be a riddle.
    """
    entries, sizes = [_entries(part) for part in parts], [len(rows) for rows in shards]
    back = np.argsort(np.concatenate(shards))
    if is_splittable(result):
        times = len(result) // len(back) if len(back) else 1
        if entries != [times * size for size in sizes]:
            raise DispatchError(
                f"a Balanced batch of {len(back)} rows, dealt as {sizes}, came back as {entries} rows: a method "
                "that is given a Balanced batch returns the same number of rows for each row it gets"
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
    with contextlib.suppress(TypeError):  # a tensor or an array of no dimension has a __len__ that raises
        return len(part)
    return None


def is_splittable(value: Any) -> bool:
    """Whether `dp` splits an argument: a batch has a length, `split(parts)` and `concat`; a tensor does not."""
    kind = type(value)
    return hasattr(kind, "split") and hasattr(kind, "concat") and hasattr(kind, "__len__")


def refuse_wrapper(value: Any, call: str) -> None:
    """Refuse an argument that a dispatch mode should have taken apart.

    Raises:
        DispatchError: it is `Balanced`, `PerRank` or `Same`.
    """
    if isinstance(value, (PerRank, Same)):
        raise DispatchError(
            f"{call} got a {type(value).__name__}, for calls of mode 'all_to_all' alone; other modes give a plain "
            "value to every rank"
        )
    if isinstance(value, Balanced):
        raise DispatchError(f"{call} got a Balanced batch, for calls of mode 'dp' alone; give the batch itself")


def is_distributed(value: Any) -> bool:
    """Whether an argument is a `DistributedBatch`, without importing what one is made of."""
    module = sys.modules.get("enginehouse.controller.distributed")
    return module is not None and isinstance(value, module.DistributedBatch)


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
            f"{label} of an all_to_all call is a list with one entry a rank, not {type(value).__name__}; "
            "wrap a value for every rank in Same(value)"
        )
    if len(values) != size:
        raise DispatchError(f"{label} of an all_to_all call has {len(values)} entries for {size} ranks")
    return values
