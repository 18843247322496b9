"""`dp` calls over meshes of dp, tp, pp and cp, on 16 real processes.

What the modes make of any mesh and batch is in `test_dispatch_properties.py`; here rows travel.
"""

import itertools
import math

import pytest
import torch
from controller_shards import Sharded, place_in_shared_memory
from hypothesis import example, given, settings
from hypothesis import strategies as st

from enginehouse.controller import Balanced, ResourcePool, WorkerGroup, WorkerSpec
from enginehouse.data import Batch, Ragged
from enginehouse.engines.mesh import Mesh

pytestmark = pytest.mark.slow  # sixteen processes import torch

RANKS = 16
AXES = ("dp", "tp", "pp", "cp")
SIZES = [sizes for sizes in itertools.product((1, 2, 4, 8, 16), repeat=len(AXES)) if math.prod(sizes) == RANKS]


@pytest.fixture(scope="module")
def group(ray_cluster):
    """Sixteen processes that take a place on one mesh after the other: starting them is what costs."""
    pool = ResourcePool([RANKS], cpus_per_process=0.25)
    try:
        with WorkerGroup(pool, WorkerSpec(Sharded).options(distributed=False), name="witnesses", timeout=240) as group:
            yield group
    finally:
        pool.shutdown()


@st.composite
def meshes(draw: st.DrawFn) -> tuple[dict[str, int], dict[str, int]]:
    """Sizes of the axes, outermost first and in any order, and where the rank that answers is."""
    sizes = dict(zip(draw(st.permutations(AXES)), draw(st.sampled_from(SIZES))))
    return sizes, {axis: draw(st.integers(0, size - 1)) for axis, size in sizes.items() if axis != "dp"}


def lie_on(group: WorkerGroup, sizes: dict[str, int], output: dict[str, int]) -> None:
    group.execute_all("lie_on", sizes, output)
    group.refresh_meshes()


def replicas_of(sizes: dict[str, int]) -> list[list[int]]:
    """The ranks of each data shard."""
    replicas: list[list[int]] = [[] for _ in range(sizes["dp"])]
    for rank in range(RANKS):
        replicas[Mesh.of(sizes, rank).coordinate("dp")].append(rank)
    return replicas


def batch_of(rows: int) -> Batch:
    ids = Ragged.from_list([list(range(row % 5)) for row in range(rows)])
    return Batch(
        {
            "number": torch.arange(rows),
            "vector": torch.arange(3 * rows, dtype=torch.int16).reshape(rows, 3),
            "ids": ids,
            "logprobs": ids.like(ids.values * -0.5),
            "note": [{"row": row} for row in range(rows)],
        }
    )


def shards_seen(group: WorkerGroup, sizes: dict[str, int]) -> list[list[int]]:
    """The rows of each data shard, after one call since the mesh was laid: all ranks of a replica saw the same."""
    seen = [rows for (rows,) in group.execute_all("what_was_seen")]
    shards = []
    for ranks in replicas_of(sizes):
        assert all(seen[rank] == seen[ranks[0]] for rank in ranks), f"ranks {ranks} are one replica"
        shards.append(seen[ranks[0]])
    return shards


def whole(result) -> Batch:
    """All rows of a result, wherever they are."""
    return result if isinstance(result, Batch) else result.fetch()


@settings(max_examples=25)
@given(meshes(), st.integers(0, 40))
@example(({"pp": 2, "dp": 2, "cp": 2, "tp": 2}, {"pp": 1, "cp": 1}), 9)
@example(({"dp": 16, "tp": 1, "pp": 1, "cp": 1}, {}), 7)
@example(({"tp": 4, "dp": 1, "pp": 4, "cp": 1}, {"pp": 3, "tp": 2}), 3)
@example(({"cp": 2, "pp": 1, "tp": 2, "dp": 4}, {}), 0)
def test_rows_reach_one_replica_each_and_come_back_from_its_output_rank(group, mesh, rows):
    sizes, output = mesh
    lie_on(group, sizes, output)
    batch = batch_of(rows)

    assert whole(group.identity(batch)).equal(batch)

    shards = shards_seen(group, sizes)
    assert [row for shard in shards for row in shard] == list(range(rows))
    answering = group.answering_rank(batch)
    assert sorted(answering) == [rank for rank in range(RANKS) if Mesh.of(sizes, rank, output).is_output_rank]
    assert all(rank in ranks for rank, ranks in zip(answering, replicas_of(sizes), strict=True))


@settings(max_examples=10)
@given(meshes(), meshes(), st.integers(0, 40))
def test_what_one_mesh_made_is_dealt_over_another(group, mesh, another, rows):
    batch = batch_of(rows)
    lie_on(group, *mesh)
    made = group.identity(batch)
    lie_on(group, *another)
    assert whole(group.identity(made)).equal(batch)
    directly = [part.tensor("number").tolist() for part in batch.split(another[0]["dp"])]
    assert shards_seen(group, another[0]) == directly


@settings(max_examples=10)
@given(meshes(), st.integers(0, 40))
def test_rows_dealt_by_tokens_come_back_in_the_order_given(group, mesh, rows):
    batch = batch_of(rows)
    lie_on(group, *mesh)
    assert whole(group.identity(Balanced(batch, by="ids"))).equal(batch)
    shards = shards_seen(group, mesh[0])
    assert sorted(row for shard in shards for row in shard) == list(range(rows))
    tokens = [sum(row % 5 for row in shard) for shard in shards]
    assert max(tokens) - min(tokens) <= 4, "the longest row has 4 tokens"


LARGE = 2**18
"""Rows of a shard whose column of int64 is 2 MB."""


@pytest.mark.parametrize("sizes", [{"dp": 2, "tp": 4, "pp": 1, "cp": 2}, {"pp": 4, "dp": 4, "tp": 1, "cp": 1}])
def test_ranks_of_a_replica_read_a_large_shard_from_one_place_in_shared_memory(group, sizes):
    lie_on(group, sizes, {})
    batch = Batch({"number": torch.arange(sizes["dp"] * LARGE)})
    assert whole(group.identity(batch)).equal(batch)
    assert_each_replica_has_its_own_place(group, sizes, "number")


def test_what_goes_from_mesh_to_mesh_is_stored_once_for_a_replica(group):
    """The rows where they were made, and a column added to them since, where it was put."""
    sizes = {"dp": 2, "tp": 4, "pp": 1, "cp": 2}
    lie_on(group, sizes, {"tp": 3})
    rows = sizes["dp"] * LARGE
    made = group.identity(Batch({"number": torch.arange(rows)}))
    lie_on(group, sizes, {})
    assert whole(group.identity(made.with_columns(added=torch.zeros(rows))))["added"].shape == (rows,)
    assert_each_replica_has_its_own_place(group, sizes, "number")
    assert_each_replica_has_its_own_place(group, sizes, "added")


def assert_each_replica_has_its_own_place(group: WorkerGroup, sizes: dict[str, int], column: str) -> None:
    places = group.execute_all("where_it_lay", column)
    of_replica = [{places[rank] for rank in ranks} for ranks in replicas_of(sizes)]
    assert None not in set.union(*of_replica), "a large shard is read from shared memory"
    assert [len(found) for found in of_replica] == [1] * sizes["dp"], "it is stored once for its replica"
    assert len(set.union(*of_replica)) == sizes["dp"]


def test_memory_of_one_process_is_told_from_shared_memory():
    assert place_in_shared_memory(torch.arange(2**18)) is None
