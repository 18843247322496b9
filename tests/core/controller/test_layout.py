"""How the data axis lies over the ranks of a group."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginehouse.controller import DataLayout, DispatchError
from enginehouse.engines.mesh import Mesh

SIZES = st.integers(1, 3)


@given(dp=SIZES, pp=SIZES, tp=SIZES, order=st.permutations(["dp", "pp", "tp"]))
def test_each_shard_goes_to_one_model_replica_and_comes_from_its_last_stage(dp, pp, tp, order):
    sizes = {axis: {"dp": dp, "pp": pp, "tp": tp}[axis] for axis in order}
    ranks = list(itertools.product(*(range(sizes[axis]) for axis in order)))
    meshes = [Mesh.of(sizes, rank, {"pp": pp - 1}) for rank in range(len(ranks))]

    layout = DataLayout.of(meshes)

    # the oracle: coordinates enumerated by itertools, the last axis fastest
    place = [dict(zip(order, coordinates)) for coordinates in ranks]
    assert layout.shards == dp
    assert list(layout.shard_of) == [one["dp"] for one in place]
    wanted = [rank for rank, one in enumerate(place) if one["tp"] == 0 and one["pp"] == pp - 1]
    assert sorted(layout.output_ranks) == wanted
    assert [place[rank]["dp"] for rank in layout.output_ranks] == list(range(dp))


def test_without_meshes_every_rank_is_a_shard():
    assert DataLayout.of([None, None]) == DataLayout(2, (0, 1), (0, 1))


def test_two_data_axes_multiply():
    meshes = [Mesh.of({"dp_replicate": 2, "dp_shard": 2}, rank) for rank in range(4)]
    assert DataLayout.of(meshes).shard_of == (0, 1, 2, 3)


def test_meshes_that_do_not_describe_one_group_are_refused():
    mesh = [Mesh.of({"dp": 2}, rank) for rank in range(2)]
    with pytest.raises(DispatchError, match="rank 1 has no mesh"):
        DataLayout.of([mesh[0], None])
    with pytest.raises(DispatchError, match="rank 1"):
        DataLayout.of([mesh[0], mesh[0]])
    with pytest.raises(DispatchError, match="3 ranks"):
        DataLayout.of([*mesh, mesh[0]])
    orders = [("dp", "tp"), ("dp", "tp"), ("tp", "dp"), ("dp", "tp")]
    with pytest.raises(DispatchError, match=r"rank 2 .*'tp': 2, 'dp': 2.*rank 0 .*'dp': 2, 'tp': 2"):
        DataLayout.of([Mesh.of(dict.fromkeys(order, 2), rank) for rank, order in enumerate(orders)])
    pipeline = [Mesh.of({"pp": 2}, rank) for rank in range(2)]
    with pytest.raises(DispatchError, match="shard"):
        DataLayout.of([pipeline[0], replace(pipeline[1], output_coordinates=(("pp", 1),))])
    for nowhere in ({"pp": 5}, {"pipeline": 1}, {"dp": 1}):
        with pytest.raises(DispatchError, match="no rank returns"):
            DataLayout.of([Mesh.of({"dp": 2, "pp": 2}, rank, nowhere) for rank in range(4)])
