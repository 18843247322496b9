"""How parameters of megatron-core are made of stored tensors."""

import pytest
import torch

from enginehouse_megatron.forms import Grouped, Heads, Stacked, Whole

HEADS = Heads(queries=2, size=3)
GROUPS = 4


def queries_keys_values():
    """Each row holds its own number, so that a row can be told from any other."""
    rows = (GROUPS * HEADS.queries * HEADS.size, GROUPS * HEADS.size, GROUPS * HEADS.size)
    begins = (0, 1000, 2000)
    return [begin + torch.arange(count).float()[:, None].expand(count, 2) for begin, count in zip(begins, rows)]


def test_each_key_value_head_stands_with_its_queries():
    together = Grouped(("q", "k", "v")).join(queries_keys_values(), HEADS)
    expected = []
    for group in range(GROUPS):
        for head in range(HEADS.queries):
            expected += [(group * HEADS.queries + head) * HEADS.size + row for row in range(HEADS.size)]
        expected += [1000 + group * HEADS.size + row for row in range(HEADS.size)]
        expected += [2000 + group * HEADS.size + row for row in range(HEADS.size)]
    assert together[:, 0].tolist() == expected


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(
    ("form", "stored"),
    [
        (Grouped(("q", "k", "v")), queries_keys_values()),
        (Grouped(("q", "k", "v")), [tensor[:, 0] for tensor in queries_keys_values()]),  # biases
        (Stacked(("gate", "up")), [torch.randn(8, 3), torch.randn(8, 3)]),
        (Whole("o", split=0), [torch.randn(8, 3)]),
    ],
)
def test_a_ranks_part_comes_apart_into_its_parts_of_the_stored_tensors(form, stored, ranks):
    for rank in range(ranks):
        parts = [tensor.chunk(ranks)[rank] for tensor in stored]
        apart = form.separate(form.join(parts, HEADS), HEADS)
        assert len(apart) == len(parts)
        assert all(torch.equal(one, part) for one, part in zip(apart, parts))
