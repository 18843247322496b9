"""Combines the ranks' results by a rule: `list`, `first`, `concat`, `distributed` or `merge`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from enginehouse.controller.errors import DispatchError
from enginehouse.controller.shards import Shard, get_last, replace_last


def collect(rule: str, parts: Sequence[Any], ranks: Sequence[int], where: str) -> Any:
    """Combine `parts`, the results of `ranks`, by a rule of `@register`. `where` is the group's name, for messages.
    Raises `DispatchError` if the results cannot be combined."""
    if rule == "list":
        return list(parts)
    if rule == "first":
        return parts[0]
    if rule == "merge":
        from enginehouse.engines.train import merge_metrics

        return merge_metrics(parts)
    if rule == "distributed" and parts and all(isinstance(part, Shard) for part in parts):
        from enginehouse.controller.distributed import DistributedBatch

        return DistributedBatch.of_shards(parts, where)
    return concat([wrap_shard(part) for part in parts] if rule == "distributed" else parts, ranks, where)


def wrap_shard(result: Any) -> Any:
    """Replace the last item of a rank's result by a `DistributedBatch`, if that item is a shard."""
    if not isinstance(shard := get_last(result), Shard):
        return result
    from enginehouse.controller.distributed import DistributedBatch

    return replace_last(result, DistributedBatch.of_shards([shard]))


def concat(parts: Sequence[Any], ranks: Sequence[int], where: str) -> Any:
    """Concatenate batches, lists, tuples, tensors or arrays; return None if all parts are None. Raises `DispatchError`
    if only some parts are None, the types differ, or the type cannot be concatenated."""
    if all(part is None for part in parts):
        return None
    kind = type(parts[0])
    if len({type(part) for part in parts}) > 1:
        types = ", ".join(f"rank {rank}: {type(part).__name__}" for rank, part in zip(ranks, parts))
        raise DispatchError(f"{where}: results of different types cannot be concatenated ({types})")
    if kind in (list, tuple):
        return kind(item for part in parts for item in part)
    if hasattr(kind, "concat"):
        return kind.concat(list(parts))
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(parts[0], torch.Tensor):
        return torch.cat(_of_one_type(parts, ranks, where))
    if numpy is not None and isinstance(parts[0], numpy.ndarray):
        return numpy.concatenate(_of_one_type(parts, ranks, where))
    raise DispatchError(
        f"{where}: results of type {kind.__name__} cannot be concatenated; "
        'register the method with collect="list", "first" or "merge"'
    )


def _of_one_type(arrays: Sequence[Any], ranks: Sequence[int], where: str) -> list[Any]:
    """Return the arrays that have rows. Raises `DispatchError` if their dtypes differ.

    Empty arrays are left out, because the dtype of an array made from an empty list is arbitrary. Without the check,
    torch and numpy would silently turn large integers into floats.
    """
    filled = {rank: array for rank, array in zip(ranks, arrays) if not array.ndim or len(array)}
    if len({array.dtype for array in filled.values()}) > 1:
        dtypes = ", ".join(f"rank {rank}: {array.dtype}" for rank, array in filled.items())
        raise DispatchError(f"{where}: results of different dtypes cannot be concatenated ({dtypes})")
    return list(filled.values()) or [arrays[0]]
