"""Putting the ranks' results together: `list`, `first`, `concat`, `merge`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from enginehouse.controller.errors import DispatchError


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
