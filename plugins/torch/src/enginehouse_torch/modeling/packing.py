"""Layouts of a batch's rows as model input, which leave out tokens that no result depends on.

Three savings, none of which changes a result:

* A row ends before its last token, which predicts nothing. Rows without needed tokens are left out.
* Only positions that predict a needed token get logits.
* Rows that begin with the same prompt are laid out as a tree: the prompt once, then each continuation. The positions of
  each continuation begin after the prompt, and an attention mask hides the continuations from one another.

Trees are either padded and stacked, or packed into one sequence without padding (`attention` chooses). The mask of a
padded tree has an element for each pair of tokens. Segments and blocks describe the mask of a packed sequence.

This module only plans layouts, in numpy on the CPU; it knows nothing of models.
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
"""Maximum tokens of a padded tree, because its mask has an element for each pair of tokens."""
WORTH_IT = 0.9
"""Rows become a tree if it costs at most this fraction of separate rows, because any mask slows attention down."""


@dataclass(frozen=True, slots=True)
class Tree:
    """Rows laid out as one sequence of model input: their shared prompt, then each row's continuation.

    Attributes:
        rows: the batch's rows, at least one.
        prompt: number of shared tokens; 0 for a single row.
        tokens: length of the sequence.
    """

    rows: tuple[int, ...]
    prompt: int
    tokens: int


@dataclass(frozen=True, slots=True)
class TreeLayout:
    """Trees, right-padded or in one sequence: the input of one forward pass, and the places of its results.

    Attributes:
        tokens: index into the batch's flat tokens for each input position, `(sequences, length)`; 0 for padding.
        positions: position of each input token in its row, same shape; 0 for padding.
        branch: 0 for a shared prompt, else the number of the row within its tree from 1, same shape; -1 for padding.
            None if no tree has a shared prompt, so that plain causal attention and positions suffice.
        predictor: for each needed token, the flat input position whose output predicts it.
        needed: for each needed token, its index in the batch's flat tokens; ascending within a row.
        packed: number of tokens of each tree, if all trees are in one sequence; None if each tree is a padded sequence.
        rows: for each tree, the length of its row and its number of tokens in the layout; None if a tree has several
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
        """Return the mask of allowed attention, `(sequences, 1, length, length)`; None if causal or packed."""
        if self.branch is None or self.packed is not None:
            return None
        query, key = self.branch[:, :, None], self.branch[:, None, :]
        length = self.branch.shape[1]
        allowed = np.tri(length, dtype=bool) & ((key == 0) | (key == query))
        return allowed[:, None]

    def segments(self) -> tuple[Indices, Indices]:
        """Return each position's segment in a packed sequence, and the segment of its prompt; both `(length,)`.

        A segment is a shared prompt, or the rest of a row; segments are numbered in order. Without a shared prompt both
        results are equal. A position attends to earlier positions of either segment, and to itself.
        """
        assert self.packed is not None
        tree = np.repeat(np.arange(len(self.packed)), self.packed)
        branch = np.ones_like(tree) if self.branch is None else self.branch[0]
        begins = np.diff(tree, prepend=-1) != 0
        own = np.cumsum(begins | (np.diff(branch, prepend=-1) != 0)) - 1
        return own, np.where(branch[begins][tree] == 0, own[begins][tree], own)

    def blocks(self, size: int) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Return which pairs of blocks of a packed sequence may attend; both `(blocks, blocks)`, queries first.

        Args:
            size: positions per block; the last block may have fewer.

        Returns:
            The pairs in which some query may attend to some key, and perhaps a few other pairs; and the pairs in which
            every query may attend to every key.
        """
        own, prompt = self.segments()
        first = np.arange(0, len(own), size)
        last = np.minimum(first + size, len(own)) - 1
        query, key = np.s_[:, None], np.s_[None, :]
        before = np.tri(len(first), k=-1, dtype=bool)
        in_own = own[last][key] >= own[first][query]  # segment numbers ascend, and keys come first
        in_prompt = (own[last][key] >= prompt[first][query]) & (own[first][key] <= prompt[last][query])
        some = before & (in_own | in_prompt) | np.eye(len(first), dtype=bool)
        one_key = (own[first] == own[last])[key]
        all_own = (own[last][query] == own[first][key]) & in_own
        all_prompt = (prompt[first][query] == own[first][key]) & (prompt[last][query] == own[first][key])
        full = before & one_key & (all_own | all_prompt)
        if len(own) % size:
            full[-1] = False  # by convention a block with fewer positions is never full
        return some, full


@dataclass(frozen=True, slots=True)
class BatchRows:
    """The rows of a batch, for a layout. `needed` and `needed_rows` have an entry per needed token, all others per row.

    Attributes:
        starts: index of each row's first token in the flat tokens.
        lengths: number of tokens of each row.
        ends: number of tokens of each row to compute: up to the one before its last needed token.
        first: position of each row's first needed token; 0 if no token is needed.
        needed: flat indices of all needed tokens.
        needed_rows: the row of each needed token.
    """

    starts: Indices
    lengths: Indices
    ends: Indices
    first: Indices
    needed: Indices
    needed_rows: Indices

    @classmethod
    def from_offsets(cls, offsets: Indices, mask: npt.NDArray[np.bool_] | None) -> BatchRows:
        """Read rows off a ragged column's offsets and a flat mask of needed tokens (None: all).

        A row's first token has no prediction and is never needed.
        """
        starts, lengths = offsets[:-1], np.diff(offsets)
        is_needed = np.ones(int(offsets[-1]), dtype=bool) if mask is None else mask.astype(bool)
        is_needed[starts[lengths > 0]] = False
        needed = np.flatnonzero(is_needed)
        needed_rows = np.repeat(np.arange(len(starts)), lengths)[needed]
        positions = needed - starts[needed_rows]
        ends, first = np.zeros_like(starts), np.zeros_like(starts)
        ends[needed_rows] = positions  # ascending within a row, so the last assignment holds
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
        rows: the batch's rows. A row's prompt is everything before its first needed token.
        ids: flat token ids.
        max_tokens: maximum tokens of a tree of several rows.
        attention_cost: cost of one token attending to another, relative to all other costs of a token.
        share_prompts: False: every row is a separate tree.
        mask_cost: cost of an element of a tree's mask, in the same unit; None: trees have no masks, and only allowed
            attention is computed.
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
        for group in _split(members, width):
            if len(group) > 1:
                trees.append(Tree(tuple(group), prompt, prompt + sum(ends[row] - prompt for row in group)))
            else:
                trees.append(Tree((group[0],), 0, ends[group[0]]))
    return trees


@functools.lru_cache(maxsize=4096)
def _cheapest_width(
    rows: int, prompt: int, continuation: float, attention_cost: float, mask_cost: float | None, most: int
) -> int:
    """Return the cheapest number of rows per tree: larger trees repeat the prompt less often but have larger masks."""

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
    """Split rows into parts of at most `width` rows. The sizes of the parts differ by at most one."""
    parts = math.ceil(len(rows) / width)
    bounds = [len(rows) * part // parts for part in range(parts + 1)]
    return [rows[start:stop] for start, stop in itertools.pairwise(bounds)]


def lay_out(rows: BatchRows, trees: list[Tree], packed: bool = False) -> TreeLayout:
    """Lay out `trees`, at least one, in one sequence if `packed`, else stacked and padded to the longest tree."""
    sizes = np.array([tree.tokens for tree in trees], dtype=np.int64)
    shape = (1, int(sizes.sum())) if packed else (len(trees), int(sizes.max()))
    begins = np.cumsum(sizes) - sizes if packed else np.arange(len(trees)) * shape[1]
    segments: list[tuple[int, int, int, int, int]] = []  # source token, tokens, input position, position, branch
    # For each row: tokens computed in its tree's prompt, and the input positions of prompt and continuation.
    shared = np.zeros(len(rows.starts), dtype=np.int64)
    prompt_at, rest_at = np.full_like(shared, -1), np.zeros_like(shared)
    starts, ends = rows.starts.tolist(), rows.ends.tolist()
    for tree, begin in zip(trees, begins.tolist(), strict=True):
        place = begin
        if tree.prompt:
            segments.append((starts[tree.rows[0]], tree.prompt, place, 0, 0))
            place += tree.prompt
        for order, row in enumerate(tree.rows, start=1):
            size = ends[row] - tree.prompt
            segments.append((starts[row] + tree.prompt, size, place, tree.prompt, order))
            shared[row], prompt_at[row], rest_at[row] = tree.prompt, begin, place
            place += size

    source, size, target, position, branch_of = np.array(segments, dtype=np.int64).T
    segment = np.repeat(np.arange(len(segments)), size)
    within = np.arange(len(segment)) - np.repeat(np.cumsum(size) - size, size)
    target_place = target[segment] + within
    tokens, positions = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    tokens.reshape(-1)[target_place] = source[segment] + within
    positions.reshape(-1)[target_place] = position[segment] + within
    branch: Indices | None = None
    if any(tree.prompt for tree in trees):
        branch = np.full(shape, -1, dtype=np.int64)
        branch.reshape(-1)[target_place] = branch_of[segment]

    inside = prompt_at[rows.needed_rows] >= 0
    needed, needed_row = rows.needed[inside], rows.needed_rows[inside]
    before = needed - rows.starts[needed_row] - 1  # the position that predicts it, in its row
    predictor = np.where(
        before < shared[needed_row], prompt_at[needed_row] + before, rest_at[needed_row] + before - shared[needed_row]
    )
    single_rows = (
        None if branch is not None else tuple((int(rows.lengths[tree.rows[0]]), tree.tokens) for tree in trees)
    )
    return TreeLayout(tokens, positions, branch, predictor, needed, sizes if packed else None, single_rows)
