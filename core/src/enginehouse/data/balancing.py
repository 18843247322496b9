"""Dealing rows to parts so that every part has about as many tokens. Pure planning: rows are numbers here.

The plan is the largest differencing method of N. Karmarkar and R. M. Karp, "The differencing method of set
partitioning" (Report UCB/CSD 82/113, University of California, Berkeley, 1982), for any number of parts. Unlike an
equal count of rows, it keeps one long answer from making its rank the one that all others wait for.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

Entry = tuple[int, int]
"""Load and number of a bag, the rows that go to one part together."""


def balance(lengths: Sequence[int] | np.ndarray, parts: int) -> list[np.ndarray]:
    """Deal rows to parts so that the sums of their lengths are as equal as a quick plan gets them.

    Largest differencing, or the greedy deal (longest row first, to the emptiest part) where that one's fullest part is
    less full. So the fullest part holds at most `4/3 - 1/(3 parts)` of what it holds in the best deal there is (Graham
    1969), and mostly the same to a token. The same lengths always give the same plan.

    Args:
        lengths: length of each row in tokens (a list, or a 1-D integer tensor in host memory or array), or another
            cost that adds up.
        parts: how many parts.

    Returns:
        Row numbers of each part, int64, ascending. Each row stands in exactly one part. The sums of two parts differ
        by at most the longest row. With fewer rows than parts the last parts are empty, else none is. Parts are in the
        order of their first rows. Rows all of one length are dealt in consecutive runs, which a `Batch` cuts without a
        copy.

    Raises:
        ValueError: if `parts` is not positive, a length is negative, or `lengths` are not one-dimensional integers.

    >>> [part.tolist() for part in balance([900, 200, 100, 100, 100, 800], 2)]
    [[0, 2, 4], [1, 3, 5]]
    """
    if parts < 1:
        raise ValueError(f"rows cannot be dealt to {parts} parts")
    costs = _as_costs(lengths)
    if not len(costs) or (costs == costs[0]).all():
        return np.array_split(np.arange(len(costs), dtype=np.int64), parts)
    # A row counts one beside its length times this: sums that are the same to a token are then told apart by rows.
    scale = 2 * len(costs) + 1
    loads = [length * scale + 1 for length in costs.tolist()]
    fullest, plan = _by_differences(loads, parts)
    greedily_fullest, greedy_plan = _greedily(loads, parts)
    if greedily_fullest < fullest:
        plan = greedy_plan
    dealt = [np.sort(np.array(rows, dtype=np.int64)) for rows in plan]
    return sorted(dealt, key=lambda rows: rows[0] if len(rows) else len(costs))


def _by_differences(loads: Sequence[int], parts: int) -> tuple[int, Sequence[list[int]]]:
    """The load of the fullest part, and the rows of each part that has any.

    A deal of some of the rows is a list of entries, least load first; parts that have no row yet are left out. The
    two deals with the largest spread are laid over each other, fullest part on emptiest, until one is left.
    """
    bags = [[row] for row in range(len(loads))]
    deals: list[tuple[int, int, list[Entry]]] = [(-load, row, [(load, row)]) for row, load in enumerate(loads)]
    heapq.heapify(deals)
    for number in range(len(loads), 2 * len(loads) - 1):
        _, _, one = heapq.heappop(deals)
        other = deals[0][2]
        both = max(len(one) + len(other) - parts, 0)
        laid = one[both:] + other[both:]
        for (load, bag), (more, another) in zip(one[:both], reversed(other[:both])):
            if len(bags[bag]) < len(bags[another]):
                bag, another = another, bag
            bags[bag] += bags[another]
            bags[another] = []
            laid.append((load + more, bag))
        laid.sort()
        emptiest = laid[0][0] if len(laid) == parts else 0
        heapq.heapreplace(deals, (emptiest - laid[-1][0], number, laid))
    last = deals[0][2]
    return last[-1][0], [bags[bag] for _, bag in last] + [[] for _ in range(parts - len(last))]


def _greedily(loads: Sequence[int], parts: int) -> tuple[int, Sequence[list[int]]]:
    """The load of the fullest part, and the rows of each part: longest row first, each to the emptiest part."""
    plan: list[list[int]] = [[] for _ in range(parts)]
    filled = [(0, part) for part in range(parts)]
    for row in sorted(range(len(loads)), key=loads.__getitem__, reverse=True):
        load, part = filled[0]
        plan[part].append(row)
        heapq.heapreplace(filled, (load + loads[row], part))
    return max(filled)[0], plan


def _as_costs(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """Lengths as a checked int64 array `(rows,)`."""
    costs = np.asarray(lengths)
    if not costs.size and costs.ndim == 1:
        return costs.astype(np.int64)  # numpy's idea of an empty list is one of floats
    if costs.ndim != 1 or costs.dtype.kind not in "iu":
        raise ValueError(f"lengths are one whole number a row, not {costs.dtype} of shape {costs.shape}")
    if (costs < 0).any():
        row = int(np.argmax(costs < 0))
        raise ValueError(f"the length of row {row} is negative: {costs[row]}")
    return costs
