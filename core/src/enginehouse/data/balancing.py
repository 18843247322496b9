"""Assignment of rows to parts that hold about the same number of tokens. This module knows only row numbers.

The algorithm is the largest differencing method of N. Karmarkar and R. M. Karp, "The differencing method of set
partitioning" (Report UCB/CSD 82/113, University of California, Berkeley, 1982), for any number of parts. If each rank
got the same number of rows instead, all ranks would wait for the rank with the longest responses.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

Entry = tuple[int, int]
"""Total length and index of a bag. A bag is a set of rows that go to the same part."""


def balance(lengths: Sequence[int] | np.ndarray, parts: int) -> list[np.ndarray]:
    """Assign rows to parts so that the sums of their lengths are nearly equal.

    Two methods are tried: largest differencing, and greedy assignment (longest row first, to the emptiest part). The
    function returns the assignment whose fullest part has the smaller sum. This sum is therefore at most
    `4/3 - 1/(3 parts)` times the optimum (Graham 1969), and usually equals the optimum. The same lengths always give
    the same assignment.

    Args:
        lengths: length of each row in tokens, or another cost that adds up. A list, a 1-D array, or a 1-D integer
            tensor in host memory.

    Returns:
        Row numbers of each part, int64, ascending. Each row is in exactly one part. The sums of two parts differ by at
        most the longest row. Parts are ordered by their first rows. With fewer rows than parts, the last parts are
        empty; otherwise no part is empty. If all rows have equal length, each part gets consecutive rows, which a
        `Batch` slices without a copy.

    Raises:
        ValueError: if `parts` is not positive, a length is negative, or `lengths` are not one-dimensional integers.

    >>> [part.tolist() for part in balance([900, 200, 100, 100, 100, 800], 2)]
    [[0, 2, 4], [1, 3, 5]]
    """
    if parts < 1:
        raise ValueError(f"rows cannot be distributed to {parts} parts: the number of parts must be positive")
    costs = _as_costs(lengths)
    if not len(costs) or (costs == costs[0]).all():
        return np.array_split(np.arange(len(costs), dtype=np.int64), parts)
    # Each row adds 1 to its scaled length, so that the number of rows decides between equal sums of tokens.
    scale = 2 * len(costs) + 1
    loads = [length * scale + 1 for length in costs.tolist()]
    fullest, plan = _assign_by_differences(loads, parts)
    greedy_fullest, greedy_plan = _assign_greedily(loads, parts)
    if greedy_fullest < fullest:
        plan = greedy_plan
    row_numbers = [np.sort(np.array(rows, dtype=np.int64)) for rows in plan]
    return sorted(row_numbers, key=lambda rows: rows[0] if len(rows) else len(costs))


def _assign_by_differences(loads: Sequence[int], parts: int) -> tuple[int, Sequence[list[int]]]:
    """Return the load of the fullest part and the rows of each part, by largest differencing.

    A partial assignment is a list of the entries that are not empty, sorted by load. Each step merges the two partial
    assignments with the largest spread: it joins the fullest part of each with the emptiest part of the other. The last
    remaining partial assignment is the result.
    """
    bags = [[row] for row in range(len(loads))]
    partials: list[tuple[int, int, list[Entry]]] = [(-load, row, [(load, row)]) for row, load in enumerate(loads)]
    heapq.heapify(partials)
    for number in range(len(loads), 2 * len(loads) - 1):
        _, _, first = heapq.heappop(partials)
        second = partials[0][2]
        pairs = max(len(first) + len(second) - parts, 0)
        merged = first[pairs:] + second[pairs:]
        for (load, bag), (more, other) in zip(first[:pairs], reversed(second[:pairs])):
            if len(bags[bag]) < len(bags[other]):
                bag, other = other, bag
            bags[bag] += bags[other]
            bags[other] = []
            merged.append((load + more, bag))
        merged.sort()
        emptiest = merged[0][0] if len(merged) == parts else 0
        heapq.heapreplace(partials, (emptiest - merged[-1][0], number, merged))
    last = partials[0][2]
    return last[-1][0], [bags[bag] for _, bag in last] + [[] for _ in range(parts - len(last))]


def _assign_greedily(loads: Sequence[int], parts: int) -> tuple[int, Sequence[list[int]]]:
    """Return the load of the fullest part and the rows of each part: longest row first, each to the emptiest part."""
    plan: list[list[int]] = [[] for _ in range(parts)]
    filled = [(0, part) for part in range(parts)]
    for row in sorted(range(len(loads)), key=loads.__getitem__, reverse=True):
        load, part = filled[0]
        plan[part].append(row)
        heapq.heapreplace(filled, (load + loads[row], part))
    return max(filled)[0], plan


def _as_costs(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return the lengths as a checked int64 array `(rows,)`."""
    costs = np.asarray(lengths)
    if not costs.size and costs.ndim == 1:
        return costs.astype(np.int64)  # numpy makes an empty list an array of floats
    if costs.ndim != 1 or costs.dtype.kind not in "iu":
        raise ValueError(f"lengths must be one-dimensional integers, not {costs.dtype} of shape {costs.shape}")
    if (costs < 0).any():
        row = int(np.argmax(costs < 0))
        raise ValueError(f"the length of row {row} is negative: {costs[row]}")
    return costs
