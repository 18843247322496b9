"""Laying the rows of a batch out as model input, so that no token is computed that nothing depends on.

Three savings, none of which changes a result:

* A row ends before its last token: nothing is predicted from that one. Rows of which nothing is needed are left out.
* Only positions that predict a needed token get logits.
* Rows that begin with the same prompt are laid out as a tree: the prompt once, then each continuation, with
  positions that go on from the prompt and an attention mask that hides the continuations from one another.

Trees stand below one another, padded, or in one sequence without padding (`attention` says when). A mask of padded
trees has the square of their tokens in elements; that of one sequence is said by segments and by blocks.

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
"""Longest padded tree: its mask has the square of its tokens in elements."""
WORTH_IT = 0.9
"""Rows become a tree if that costs at most this part of what they cost apart: attention is slower with any mask."""


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
class TreeLayout:
    """Trees, right-padded or in one sequence: the input of one forward pass, and where its results belong.

    Attributes:
        tokens: index into the batch's flat tokens for each input position, `(sequences, length)`; padding has 0.
        positions: position of each input token in its row, same shape; padding has 0.
        branch: 0 for a shared prompt, otherwise the number of the row within its tree from 1, same shape; padding -1.
            None where no tree has a shared prompt: plain causal attention and positions then do.
        predictor: for each needed token, the flat input position whose output predicts it.
        needed: for each needed token, its index in the batch's flat tokens; ascending within a row.
        packed: tokens of each tree of the one sequence that they make up; None where each is a padded sequence.
        rows: how many tokens the row of each tree has, and how many of them are here; None where some tree is several
            rows.
    """

    tokens: Indices
    positions: Indices
    branch: Indices | None
    predictor: Indices
    needed: Indices
    packed: Indices | None = None
    rows: tuple[tuple[int, int], ...] | None = None

    def attention_allowed(self) -> npt.NDArray[np.bool_] | None:
        """Which input position may attend to which, `(sequences, 1, length, length)`; None for plain causal.

        None as well for one sequence: `segments` and `blocks` say it there.
        """
        if self.branch is None or self.packed is not None:
            return None
        query, key = self.branch[:, :, None], self.branch[:, None, :]
        length = self.branch.shape[1]
        allowed = np.tri(length, dtype=bool) & ((key == 0) | (key == query))
        return allowed[:, None]

    def segments(self) -> tuple[Indices, Indices]:
        """For each position of one sequence its segment, and that of the prompt it goes on from; both `(length,)`.

        A segment is a shared prompt, or what a row has beside it; they are numbered in order. Where there is no shared
        prompt the second is the first. A position attends to those not after it that are in either.
        """
        assert self.packed is not None
        tree = np.repeat(np.arange(len(self.packed)), self.packed)
        branch = np.ones_like(tree) if self.branch is None else self.branch[0]
        begins = np.diff(tree, prepend=-1) != 0
        own = np.cumsum(begins | (np.diff(branch, prepend=-1) != 0)) - 1
        return own, np.where(branch[begins][tree] == 0, own[begins][tree], own)

    def blocks(self, size: int) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """What blocks of one sequence's positions may attend to; both `(blocks, blocks)`, queries first.

        Args:
            size: positions of a block; the last may have fewer.

        Returns:
            Pairs of blocks in which some position may attend to another, and a few in which none does; and pairs in
            which each of the first may attend to each of the second.
        """
        own, prompt = self.segments()
        first = np.arange(0, len(own), size)
        last = np.minimum(first + size, len(own)) - 1
        query, key = np.s_[:, None], np.s_[None, :]
        before = np.tri(len(first), k=-1, dtype=bool)
        in_own = own[last][key] >= own[first][query]  # numbers ascend, and keys stand before
        in_prompt = (own[last][key] >= prompt[first][query]) & (own[first][key] <= prompt[last][query])
        some = before & (in_own | in_prompt) | np.eye(len(first), dtype=bool)
        one_key = (own[first] == own[last])[key]
        all_own = (own[last][query] == own[first][key]) & in_own
        all_prompt = (prompt[first][query] == own[first][key]) & (prompt[last][query] == own[first][key])
        whole = before & one_key & (all_own | all_prompt)
        if len(own) % size:
            whole[-1] = False  # by convention: a block with fewer positions is never whole
        return some, whole


@dataclass(frozen=True, slots=True)
class BatchRows:
    """The rows of a batch as the layout needs them, all arrays over rows.

    Attributes:
        starts: index of each row's first token in the flat tokens.
        lengths: tokens of each row.
        ends: number of tokens of each row that must be computed: up to the one before its last needed token.
        first: position of each row's first needed token; 0 where nothing is needed.
        needed: flat indices of all needed tokens.
        needed_rows: the row of each of them.
    """

    starts: Indices
    lengths: Indices
    ends: Indices
    first: Indices
    needed: Indices
    needed_rows: Indices

    @classmethod
    def from_offsets(cls, offsets: Indices, mask: npt.NDArray[np.bool_] | None) -> BatchRows:
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
        return cls(starts, lengths, ends, first, needed, needed_rows)


def plan_trees(
    rows: BatchRows,
    ids: npt.NDArray[np.integer],
    max_tokens: int,
    attention_cost: float,
    share_prompts: bool,
    mask_cost: float | None = 0.0,
) -> list[Tree]:
    """Group rows that share their prompt into trees; every row with a needed token is in exactly one.

    Args:
        rows: the batch's rows. A row's prompt is what stands before its first needed token.
        ids: flat token ids.
        max_tokens: most tokens a tree of several rows may have.
        attention_cost: what one token attending to one other costs, relative to all else that a token costs.
        share_prompts: False: every row stands alone.
        mask_cost: what an element of a tree's mask costs, in the same unit; None: trees have none, and only what may
            be attended to is computed.
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
        most = ((max_tokens if mask_cost is None else min(max_tokens, MAX_TREE_TOKENS)) - prompt) // max(longest, 1)
        width = _cheapest_width(len(members), prompt, continuation, attention_cost, mask_cost, most)
        for part in _split(members, width):
            if len(part) > 1:
                trees.append(Tree(tuple(part), prompt, prompt + sum(ends[row] - prompt for row in part)))
            else:
                trees.append(Tree((part[0],), 0, ends[part[0]]))
    return trees


@functools.lru_cache(maxsize=4096)
def _cheapest_width(
    rows: int, prompt: int, continuation: float, attention_cost: float, mask_cost: float | None, most: int
) -> int:
    """How many of `rows` to put in a tree: more repeat the prompt less often, but a mask's square is larger."""

    def cost(width: int) -> float:
        tokens = prompt + width * continuation
        if mask_cost is None:
            attention = attention_cost * (prompt**2 + width * (2 * prompt + continuation) * continuation)
        else:
            attention = (attention_cost + (mask_cost if width > 1 else 0.0)) * tokens**2
        return math.ceil(rows / width) * (tokens + attention)

    best = min(range(1, max(1, min(rows, most)) + 1), key=cost)
    return best if cost(best) < WORTH_IT * cost(1) else 1


def _split(rows: list[int], width: int) -> list[list[int]]:
    """Split into parts of at most `width` rows that differ in size by at most one."""
    parts = math.ceil(len(rows) / width)
    bounds = [len(rows) * part // parts for part in range(parts + 1)]
    return [rows[start:stop] for start, stop in itertools.pairwise(bounds)]


def lay_out(rows: BatchRows, trees: list[Tree], packed: bool = False) -> TreeLayout:
    """Lay `trees` below one another, padded to the longest, or behind one another in one sequence.

    Args:
        rows: the rows the trees were planned from.
        trees: at least one.
        packed: whether they make up one sequence.
    """
    sizes = np.array([tree.tokens for tree in trees], dtype=np.int64)
    shape = (1, int(sizes.sum())) if packed else (len(trees), int(sizes.max()))
    begins = np.cumsum(sizes) - sizes if packed else np.arange(len(trees)) * shape[1]
    segments: list[tuple[int, int, int, int, int]] = []  # source token, tokens, input position, position, branch
    shared = np.zeros(len(rows.starts), dtype=np.int64)  # of each row: tokens computed in its tree's prompt
    prompt_at, rest_at = np.full_like(shared, -1), np.zeros_like(shared)  # of each row: input position of both parts
    starts, ends = rows.starts.tolist(), rows.ends.tolist()
    for tree, begin in zip(trees, begins.tolist(), strict=True):
        at = begin
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
    alone = None if branch is not None else tuple((int(rows.lengths[tree.rows[0]]), tree.tokens) for tree in trees)
    return TreeLayout(tokens, positions, branch, predictor, needed, sizes if packed else None, alone)
