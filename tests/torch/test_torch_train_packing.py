"""The layout of rows: every needed token is predicted from exactly the tokens before it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from enginehouse_torch.modeling.packing import MAX_TREE_TOKENS, BatchRows, Tree, lay_out, plan_trees

PROMPTS = st.lists(st.integers(0, 3), min_size=1, max_size=4)
RESPONSES = st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=5)
ROWS = st.lists(st.tuples(PROMPTS, RESPONSES), max_size=12)


def _rows(rows, masked):
    ids = np.array([token for prompt, response in rows for token in prompt + [t for t, _ in response]], dtype=np.int64)
    mask = [flag for prompt, response in rows for flag in [False] * len(prompt) + [f for _, f in response]]
    offsets = np.concatenate(([0], np.cumsum([len(prompt) + len(response) for prompt, response in rows]))).astype(
        np.int64
    )
    return ids, offsets, np.array(mask, dtype=bool) if masked else None


def _seen(layout):
    """Which position may attend to which, `(sequences, length, length)`, written out."""
    causal = np.tri(layout.tokens.shape[1], dtype=bool)[None]
    if layout.packed is None:
        allowed = layout.attention_allowed()
        return np.broadcast_to(causal, (len(layout.tokens), *causal.shape[1:])) if allowed is None else allowed[:, 0]
    own, prompt = layout.segments()
    return causal & ((own[None, None, :] == own[None, :, None]) | (own[None, None, :] == prompt[None, :, None]))


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    rows=ROWS,
    masked=st.booleans(),
    share=st.booleans(),
    packed=st.booleans(),
    cost=st.sampled_from([0.0, 0.01, 0.5]),
    budget=st.integers(1, 40),
)
def test_each_needed_token_is_predicted_once_from_what_stands_before_it(rows, masked, share, packed, cost, budget):
    ids, offsets, mask = _rows(rows, masked)
    read = BatchRows.from_offsets(offsets, mask)
    trees = plan_trees(read, ids, budget, cost, share, None if packed else 0.0)
    wanted = np.ones(len(ids), dtype=bool) if mask is None else mask.copy()
    wanted[offsets[:-1]] = False
    assert sorted(read.needed.tolist()) == np.flatnonzero(wanted).tolist()
    if not trees:
        assert not wanted.any()
        return
    layout = lay_out(read, trees, packed)
    assert sorted(layout.needed.tolist()) == np.flatnonzero(wanted).tolist()

    assert not packed or layout.tokens.size == sum(tree.tokens for tree in trees), "padded"
    allowed = _seen(layout)
    _, length = layout.tokens.shape
    for token, predictor in zip(layout.needed, layout.predictor, strict=True):
        sequence, place = divmod(int(predictor), length)
        seen = allowed[sequence, place]
        row = int(np.searchsorted(offsets, token, side="right")) - 1
        before = ids[offsets[row] : token]
        assert ids[layout.tokens[sequence, seen]].tolist() == before.tolist()
        assert layout.positions[sequence, seen].tolist() == list(range(len(before)))
    assert allowed.any(-1).all(), "a position that attends to nothing gives nan"
    assert (layout.branch is None) == (max(len(tree.rows) for tree in trees) == 1)
    assert all(tree.tokens <= budget for tree in trees if len(tree.rows) > 1)


def test_a_group_of_rows_computes_its_prompt_once():
    prompt, responses = [1, 2, 3, 4], [[5, 6], [7, 8], [9, 1]]
    ids = np.array([token for response in responses for token in prompt + response])
    mask = np.array([flag for _ in responses for flag in [False] * 4 + [True] * 2])
    rows = BatchRows.from_offsets(np.array([0, 6, 12, 18]), mask)
    (tree,) = plan_trees(rows, ids, 1000, 0.0, True)
    assert tree.tokens == 4 + 3 * 1, "of each response all but its last token is an input"
    assert ids[lay_out(rows, [tree]).tokens].tolist() == [[1, 2, 3, 4, 5, 7, 9]]


def test_dear_attention_makes_trees_narrow():
    rows = BatchRows.from_offsets(np.arange(0, 8 * 20 + 1, 20), np.tile(np.arange(20) >= 10, 8))
    ids = np.tile(np.arange(20), 8)
    widths = [max(len(tree.rows) for tree in plan_trees(rows, ids, 1000, cost, True)) for cost in (0.0, 0.005, 1.0)]
    assert widths[0] == 8
    assert widths[0] > widths[1] > widths[2] == 1


@pytest.mark.parametrize("rows", [2, 64])
def test_a_tree_stays_within_what_its_mask_may_cost(rows):
    length = 1000
    read = BatchRows.from_offsets(np.arange(rows + 1) * length, np.tile(np.arange(length) >= 900, rows))
    trees = plan_trees(read, np.tile(np.arange(length), rows), 10**9, 0.0, True)
    assert max(tree.tokens for tree in trees) <= MAX_TREE_TOKENS
    assert sorted(row for tree in trees for row in tree.rows) == list(range(rows))


@settings(max_examples=300, deadline=None)
@given(
    sizes=st.lists(
        st.tuples(st.integers(0, 9), st.lists(st.integers(0, 6), min_size=1, max_size=4)), min_size=1, max_size=6
    ),
    size=st.integers(1, 5),
)
def test_blocks_cover_what_may_be_attended_to_and_are_whole_only_where_all_of_it_may(sizes, size):
    trees, offsets, masks = [], [0], []
    for prompt, responses in sizes:
        responses = responses if prompt else [responses[0] + 1]
        rows = tuple(range(len(masks), len(masks) + len(responses)))
        for response in responses:  # a row's last token is no input
            masks.append([False] * max(prompt, 1) + [True] * (response + (prompt > 0)))
            offsets.append(offsets[-1] + len(masks[-1]))
        trees.append(Tree(rows, prompt, prompt + sum(responses)))
    layout = lay_out(BatchRows.from_offsets(np.array(offsets), np.concatenate(masks).astype(bool)), trees, packed=True)
    (seen,) = _seen(layout)
    blocks = -(-len(seen) // size)
    padded = np.zeros((blocks * size,) * 2, dtype=bool)
    padded[: len(seen), : len(seen)] = seen
    tiles = padded.reshape(blocks, size, blocks, size).swapaxes(1, 2)
    some, whole = layout.blocks(size)
    assert (some | ~tiles.any((-2, -1))).all(), "a block is left out in which there is something"
    assert not (whole & ~tiles.all((-2, -1))).any(), "a block is whole in which something is hidden"
    assert not (whole & ~some).any()


def test_few_blocks_are_computed_for_nothing():
    prompt, response, rows = 512, 256, 8
    tree = Tree(tuple(range(rows)), prompt, prompt + rows * response)
    lengths = prompt + response + 1
    read = BatchRows.from_offsets(np.arange(2 * rows + 1) * lengths, np.tile(np.arange(lengths) > prompt, 2 * rows))
    other = Tree(tuple(range(rows, 2 * rows)), prompt, prompt + rows * response)
    some, whole = lay_out(read, [tree, other], packed=True).blocks(128)
    within_prompt, of_a_response = 4 * 5 // 2, 2 * 4 + 2 * 3 // 2
    assert some.sum() == 2 * (within_prompt + rows * of_a_response)
    assert (some & ~whole).sum() == len(some), "only where a block meets itself is something hidden"


def test_a_mask_that_costs_much_makes_no_trees_and_none_lets_them_be_wide():
    rows = BatchRows.from_offsets(np.arange(0, 8 * 20 + 1, 20), np.tile(np.arange(20) >= 10, 8))
    ids = np.tile(np.arange(20), 8)

    def widest(mask_cost):
        return max(len(tree.rows) for tree in plan_trees(rows, ids, 1000, 0.005, True, mask_cost))

    assert widest(None) == 8 > widest(0.0) > widest(0.01) == 1
