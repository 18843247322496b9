"""`dp` calls over meshes, on real processes and real batches."""

import pytest
import torch
from controller_shards import Sharded

from enginehouse.controller import DispatchError
from enginehouse.data import Batch

pytestmark = pytest.mark.slow


def batch_of(count: int) -> Batch:
    return Batch({"x": torch.arange(count), "name": [f"row {index}" for index in range(count)]})


@pytest.fixture
def lie_on(standing):
    """Four ranks on a mesh."""

    def lie_on(sizes, output=None):
        group = standing(Sharded, name="sharded", processes=4)
        group.execute_all("lie_on", sizes, output)
        group.refresh_meshes()
        return group

    return lie_on


@pytest.mark.parametrize("count", [5, 2, 1, 0])
def test_rows_come_back_in_order_from_a_model_parallel_group(lie_on, count):
    group = lie_on({"pp": 2, "dp": 2, "tp": 1}, {"pp": 1})
    result = group.times(batch_of(count), factor=10).fetch()
    assert result.tensor("x").tolist() == [10 * row for row in range(count)]
    assert list(result.objects("name")) == [f"row {row}" for row in range(count)]
    seen = group.execute_all("what_was_seen")
    assert seen[0] == seen[2], "both stages of a pipeline see the same shard"
    assert seen[1] == seen[3]
    assert [row for shard in (seen[0][0], seen[1][0]) for row in shard] == list(range(count))


def test_results_come_from_output_ranks_only(lie_on):
    group = lie_on({"pp": 2, "dp": 2}, {"pp": 1})
    assert group.answer_from(batch_of(5)) == [(2, 3), (3, 2)]
    assert group.rows(batch_of(5)) == [3, 2]
    assert group.nothing(batch_of(5)) is None
    assert group.layout.output_ranks == (2, 3)


def test_large_shards_are_shared_by_a_replica(lie_on):
    group = lie_on({"dp": 1, "tp": 4})
    assert group.times(batch_of(50_000)).column("x").sum() == 2 * sum(range(50_000))


def test_a_future_of_a_batch_is_split_like_the_batch(lie_on):
    group = lie_on({"dp": 2, "tp": 2})
    future = group.call("times", batch_of(4), factor=1, blocking=False)
    assert group.times(future, factor=1).column("x").tolist() == [0, 1, 2, 3]
    assert group.execute_all("what_was_seen") == [2 * [rows] for rows in ([0, 1], [0, 1], [2, 3], [2, 3])]


def test_without_a_mesh_every_rank_is_a_replica(launch):
    group = launch(Sharded)
    assert group.meshes == [None, None]
    assert group.rows(batch_of(3)) == [2, 1]
    group.execute_all("lie_on", {"dp": 1, "tp": 2})
    assert group.rows(batch_of(3)) == [2, 1], "a mesh made later counts once it is asked for"
    group.refresh_meshes()
    assert group.rows(batch_of(3)) == [3]


def test_a_mesh_of_another_size_is_an_error_that_names_it(lie_on):
    group = lie_on({"dp": 8})
    with pytest.raises(DispatchError, match=r"of 8.*4 ranks"):
        group.rows(batch_of(3))
