"""Division of a batch into micro-batches under a token budget."""

from __future__ import annotations

import bisect
from collections.abc import Sequence


def plan_microbatches(lengths: Sequence[int], max_tokens: int, padded: bool = True) -> list[list[int]]:
    """Choose the rows of each micro-batch.

    Rows of similar length are grouped. If all rows have equal length, they are split in order into the fewest groups of
    nearly equal size. The same lengths always give the same plan.

    Args:
        lengths: length of each row in tokens, as a list, or a 1-D integer tensor or array.
        max_tokens: maximum number of tokens of a micro-batch. A longer row gets its own micro-batch.
        padded: True: the cost of a micro-batch is its number of rows times the length of its longest row. False: it is
            the sum of its row lengths.

    Returns:
        Row numbers of each micro-batch. Each row is in exactly one micro-batch. Without rows, the list is empty.

    Raises:
        ValueError: if `max_tokens` is not positive, or a length is negative.

    >>> plan_microbatches([3, 3, 3, 3, 3], max_tokens=9)
    [[0, 1, 2], [3, 4]]
    >>> plan_microbatches([1, 9, 2], max_tokens=4)
    [[1], [2, 0]]
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be positive, not {max_tokens}")
    lengths = lengths if isinstance(lengths, (list, tuple, range)) else [int(length) for length in lengths]
    if not lengths:
        return []
    shortest, longest = min(lengths), max(lengths)
    if shortest < 0:
        raise ValueError(f"the length of row {lengths.index(shortest)} is negative: {shortest}")
    if shortest == longest:
        return _even(len(lengths), max(1, max_tokens // longest) if longest else len(lengths))
    longest_first = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    return (_fill_padded if padded else _fill_packed)(longest_first, lengths, max_tokens)


def _even(rows: int, most: int) -> list[list[int]]:
    """Return the fewest groups of at most `most` consecutive rows, with sizes that differ by at most one."""
    groups = -(-rows // most)
    size, larger = divmod(rows, groups)
    plan, start = [], 0
    for group in range(groups):
        stop = start + size + (group < larger)
        plan.append(list(range(start, stop)))
        start = stop
    return plan


def _fill_padded(rows: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Group rows from long to short. The cost of a group is its number of rows times the length of its first row."""
    plan = [[rows[0]]]
    for row in rows[1:]:
        group = plan[-1]
        if (len(group) + 1) * lengths[group[0]] <= max_tokens:
            group.append(row)
        else:
            plan.append([row])
    return plan


def _fill_packed(rows: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Put each row, longest first, into the fullest group that has room for it. The number of groups is at most about
    11/9 of the minimum."""
    plan: list[list[int]] = []
    room: list[tuple[int, int]] = []  # tokens left and group number, sorted
    for row in rows:
        place = bisect.bisect_left(room, (lengths[row], -1))
        if place < len(room):
            left, group = room.pop(place)
            plan[group].append(row)
        else:
            left, group = max_tokens, len(plan)
            plan.append([row])
        bisect.insort(room, (left - lengths[row], group))
    return plan
