"""Putting the ranks' results together: `list`, `first`, `concat`, `merge`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from enginehouse.controller.errors import DispatchError

if TYPE_CHECKING:
    from enginehouse.controller.group import WorkerGroup


def collect(rule: str, parts: Sequence[Any], ranks: Sequence[int], where: str) -> Any:
    """Put `parts`, the results of `ranks`, together by a rule of `@register`.

    Args:
        rule: `"list"`, `"first"`, `"concat"` or `"merge"`.
        parts: one result for each of `ranks`.
        ranks: the ranks they come from, for messages.
        where: group and method, for messages.

    Raises:
        DispatchError: the results do not fit together.
    """
    if rule == "list":
        return list(parts)
    if rule == "first":
        return parts[0]
    if rule == "merge":
        from enginehouse.engines.train import merge_metrics

        return merge_metrics(parts)
    return concat(parts, ranks, where)


def concat(parts: Sequence[Any], ranks: Sequence[int], where: str) -> Any:
    """Concatenate batches, lists, tuples, tensors or arrays; None if all are None.

    Raises:
        DispatchError: some are None and others not, the types differ, or the type cannot be concatenated.
    """
    if all(part is None for part in parts):
        return None
    kind = type(parts[0])
    if len({type(part) for part in parts}) > 1:
        said = ", ".join(f"rank {rank}: {type(part).__name__}" for rank, part in zip(ranks, parts))
        raise DispatchError(f"{where}: results of different types cannot be concatenated ({said})")
    if kind in (list, tuple):
        return kind(item for part in parts for item in part)
    if hasattr(kind, "concat"):
        return kind.concat(list(parts))
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(parts[0], torch.Tensor):
        return torch.cat(list(parts))
    if numpy is not None and isinstance(parts[0], numpy.ndarray):
        return numpy.concatenate(list(parts))
    raise DispatchError(
        f"{where}: results of type {kind.__name__} cannot be concatenated; "
        'register the method with collect="list", "first" or "merge"'
    )


# The built-in modes' collections in the form a plugin's has, `(group, outputs)`, for their records (`plugin.py`).


def collect_list(group: WorkerGroup, outputs: Sequence[Any]) -> Any:
    """A list of all results, one a rank."""
    return collect("list", outputs, range(group.world_size), group.name)


def collect_first(group: WorkerGroup, outputs: Sequence[Any]) -> Any:
    """Rank 0's result."""
    return collect("first", outputs[:1], (0,), group.name)


def collect_concat(group: WorkerGroup, outputs: Sequence[Any]) -> Any:
    """The output ranks' results as one, in order."""
    ranks = group.layout.output_ranks
    return collect("concat", [outputs[rank] for rank in ranks], ranks, group.name)
