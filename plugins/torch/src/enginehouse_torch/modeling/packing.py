"""Laying the rows of a batch out as model input, so that no token is computed that nothing depends on.

Three savings, none of which changes a result:

* A row ends before its last token: nothing is predicted from that one. Rows of which nothing is needed are left out.
* Only positions that predict a needed token get logits.
* Rows that begin with the same prompt are laid out as a tree: the prompt once, then each continuation, with
  positions that go on from the prompt and an attention mask that hides the continuations from one another.

This module decides and indexes, in numpy on the CPU; it knows nothing of models.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]

MAX_TREE_TOKENS = 4096
"""Longest tree: its mask has the square of its tokens in elements."""
WORTH_IT = 0.9
"""Rows become a tree if that costs at most this part of what they cost apart: a mask makes attention slower."""


@dataclass(frozen=True, slots=True)
class Tree:
    """Rows laid out as one sequence of model input: their shared prompt, then each row's continuation.

    Attributes:
        rows: the batch's rows, at least one.
        prompt: number of shared tokens; 0 for a row that stands alone.
        tokens: length of the sequence.
    """

    rows: tuple[int, ...]
    prompt: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Trees side by side, right-padded: the input of one forward pass, and where its results belong.

    Attributes:
        tokens: index into the batch's flat tokens for each input position, `(sequences, length)`; padding has 0.
        positions: position of each input token in its row, same shape; padding has 0.
        branch: 0 for a shared prompt, otherwise the number of the row within its tree from 1, same shape; padding -1.
            None where no tree has a shared prompt: plain causal attention and positions then do.
        predictor: for each needed token, the flat input position whose output predicts it.
        needed: for each needed token, its index in the batch's flat tokens; ascending within a row.
    """

    tokens: Indices
    positions: Indices
    branch: Indices | None
    predictor: Indices
    needed: Indices

    def attention_allowed(self) -> npt.NDArray[np.bool_] | None:
        """Which input position may attend to which, `(sequences, 1, length, length)`; None for plain causal."""
        if self.branch is None:
            return None
        query, key = self.branch[:, :, None], self.branch[:, None, :]
        length = self.branch.shape[1]
        allowed = np.tri(length, dtype=bool) & ((key == 0) | (key == query))
        return allowed[:, None]


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a batch as the layout needs them, all arrays over rows.

    Attributes:
        starts: index of each row's first token in the flat tokens.
        ends: number of tokens of each row that must be computed: up to the one before its last needed token.
        first: position of each row's first needed token; 0 where nothing is needed.
        needed: flat indices of all needed tokens.
        needed_rows: the row of each of them.
    """

    starts: Indices
    ends: Indices
    first: Indices
    needed: Indices
    needed_rows: Indices

    @classmethod
    def of(cls, offsets: Indices, mask: npt.NDArray[np.bool_] | None) -> Rows:
        """Read them off a ragged column's offsets and a flat mask of needed tokens (None: all).

        A row's first token has no prediction and is never needed.
        """
        starts, lengths = offsets[:-1], np.diff(offsets)
        wanted = np.ones(int(offsets[-1]), dtype=bool) if mask is None else mask.astype(bool)
        wanted[starts[lengths > 0]] = False
        needed = np.flatnonzero(wanted)
        needed_rows = np.repeat(np.arange(len(starts)), lengths)[needed]
        positions = needed - starts[needed_rows]
        ends, first = np.zeros_like(starts), np.zeros_like(starts)
        ends[needed_rows] = positions  # ascending within a row: the last one stands
        first[needed_rows[::-1]] = positions[::-1]
        return cls(starts, ends, first, needed, needed_rows)


def plan_trees(
    rows: Rows, ids: npt.NDArray[np.integer], max_tokens: int, attention_cost: float, share_prompts: bool
) -> list[Tree]:
    """Group rows that share their prompt into trees; every row with a needed token is in exactly one.

    Args:
        rows: the batch's rows. A row's prompt is what stands before its first needed token.
        ids: flat token ids.
        max_tokens: most tokens a tree of several rows may have.
        attention_cost: what one token attending to one other costs, relative to all else that a token costs.
        share_prompts: False: every row stands alone.
    """
    present = np.flatnonzero(rows.ends)
    if not share_prompts:
        return [Tree((row,), 0, end) for row, end in zip(present.tolist(), rows.ends[present].tolist(), strict=True)]
    starts, ends, first = rows.starts.tolist(), rows.ends.tolist(), rows.first.tolist()
    groups: dict[bytes, list[int]] = defaultdict(list)
    for row in present.tolist():
        groups[ids[starts[row] : starts[row] + first[row]].tobytes()].append(row)
    trees = []
    for members in groups.values():
        prompt = first[members[0]]
        continuation = sum(ends[row] - prompt for row in members) / len(members)
        longest = max(ends[row] for row in members) - prompt
        most = (min(max_tokens, MAX_TREE_TOKENS) - prompt) // max(longest, 1)
        for part in _split(members, _cheapest_width(len(members), prompt, continuation, attention_cost, most)):
            if len(part) > 1:
                trees.append(Tree(tuple(part), prompt, prompt + sum(ends[row] - prompt for row in part)))
            else:
                trees.append(Tree((part[0],), 0, ends[part[0]]))
    return trees


@functools.lru_cache(maxsize=4096)
def _cheapest_width(rows: int, prompt: int, continuation: float, attention_cost: float, most: int) -> int:
    """How many of `rows` to put in a tree: more repeat the prompt less often, but attend in a larger square."""

    def cost(width: int) -> float:
        tokens = prompt + width * continuation
        return math.ceil(rows / width) * (tokens + attention_cost * tokens**2)

    best = min(range(1, max(1, min(rows, most)) + 1), key=cost)
    return best if cost(best) < WORTH_IT * cost(1) else 1


def _split(rows: list[int], width: int) -> list[list[int]]:
    """Split into parts of at most `width` rows that differ in size by at most one."""
    parts = math.ceil(len(rows) / width)
    bounds = [len(rows) * part // parts for part in range(parts + 1)]
    return [rows[start:stop] for start, stop in itertools.pairwise(bounds)]


def lay_out(rows: Rows, trees: list[Tree]) -> Layout:
    """Lay `trees` side by side, padded to the longest.

    Args:
        rows: the rows the trees were planned from.
        trees: at least one.
    """
    length = max(tree.tokens for tree in trees)
    segments: list[tuple[int, int, int, int, int]] = []  # source token, tokens, input position, position, branch
    shared = np.zeros(len(rows.starts), dtype=np.int64)  # of each row: tokens computed in its tree's prompt
    prompt_at, rest_at = np.full_like(shared, -1), np.zeros_like(shared)  # of each row: input position of both parts
    starts, ends = rows.starts.tolist(), rows.ends.tolist()
    for number, tree in enumerate(trees):
        at = begin = number * length
        if tree.prompt:
            segments.append((starts[tree.rows[0]], tree.prompt, at, 0, 0))
            at += tree.prompt
        for order, row in enumerate(tree.rows, start=1):
            size = ends[row] - tree.prompt
            segments.append((starts[row] + tree.prompt, size, at, tree.prompt, order))
            shared[row], prompt_at[row], rest_at[row] = tree.prompt, begin, at
            at += size

    source, size, target, position, branch_of = np.array(segments, dtype=np.int64).T
    segment = np.repeat(np.arange(len(segments)), size)
    within = np.arange(len(segment)) - np.repeat(np.cumsum(size) - size, size)
    here = target[segment] + within
    shape = (len(trees), length)
    tokens, positions = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    tokens.reshape(-1)[here] = source[segment] + within
    positions.reshape(-1)[here] = position[segment] + within
    branch: Indices | None = None
    if any(tree.prompt for tree in trees):
        branch = np.full(shape, -1, dtype=np.int64)
        branch.reshape(-1)[here] = branch_of[segment]

    inside = prompt_at[rows.needed_rows] >= 0
    needed, of = rows.needed[inside], rows.needed_rows[inside]
    before = needed - rows.starts[of] - 1  # the position that predicts it, in its row
    predictor = np.where(before < shared[of], prompt_at[of] + before, rest_at[of] + before - shared[of])
    return Layout(tokens, positions, branch, predictor, needed)
