"""`megatron_compute`: one entry a data-parallel rank goes in, one result a data-parallel rank comes out."""

import itertools
from types import SimpleNamespace

import pytest
from megatron_workers import Witness

from enginehouse.controller import ResourcePool, Same, WorkerSpec
from enginehouse.controller.dispatch import resolve_mode
from enginehouse.controller.errors import DispatchError
from enginehouse.controller.layout import DataLayout
from enginehouse.controller.registration import CallSpec
from enginehouse.engines.mesh import Mesh
from enginehouse_megatron.dispatch import MegatronWorkerGroup

SIZES = [dict(zip(("pp", "dp", "cp", "tp"), sizes)) for sizes in itertools.product((1, 2, 3), repeat=4)]


def group_of(sizes: dict[str, int]):
    """What a mode looks at: a group's layout."""
    ranks = sizes["pp"] * sizes["dp"] * sizes["cp"] * sizes["tp"]
    meshes = [Mesh.of(sizes, rank, output={"pp": sizes["pp"] - 1}) for rank in range(ranks)]
    return SimpleNamespace(world_size=ranks, meshes=meshes, layout=DataLayout.of(meshes))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_rank_of_a_replica_gets_its_entry_and_one_of_the_last_stage_answers(sizes):
    group = group_of(sizes)
    mode = resolve_mode(CallSpec("megatron_compute"))
    calls = mode.dispatch(group, list(range(sizes["dp"])), scale=Same("all"))
    for mesh, call in zip(group.meshes, calls, strict=True):
        assert call == ((mesh.coordinate("dp"),), {"scale": "all"})
    answering = [group.meshes[rank] for rank in mode.returning(group)]
    assert [mesh.coordinate("dp") for mesh in answering] == list(range(sizes["dp"]))
    for mesh in answering:
        assert (mesh.coordinate("tp"), mesh.coordinate("cp")) == (0, 0)
        assert mesh.coordinate("pp") == sizes["pp"] - 1


@pytest.mark.parametrize(
    ("value", "said"),
    [(["one"], "must have 2 entries, .*, not 1"), ("two", r"a list with one entry for each of the 2 .*Same\(value\)")],
)
def test_an_argument_needs_an_entry_for_each_data_parallel_rank(value, said):
    mode = resolve_mode(CallSpec("megatron_compute"))
    with pytest.raises(DispatchError, match=said):
        mode.dispatch(group_of({"pp": 1, "dp": 2, "cp": 1, "tp": 2}), value)


@pytest.mark.slow
def test_a_group_of_processes_knows_its_axes_and_answers_for_each_data_parallel_rank(ray_cluster):
    sizes = {"pp": 2, "dp": 2, "cp": 1, "tp": 1}
    spec = WorkerSpec(Witness, sizes).options(distributed=False)
    with MegatronWorkerGroup(ResourcePool([4], cpus_per_process=0.25), spec, name="witnesses") as group:
        assert (group.pp_size, group.dp_size, group.cp_size, group.tp_size) == (2, 2, 1, 1)
        assert group.answer(["a", "b"], scale=[3, 4]) == [(2, "a", 3), (3, "b", 4)]
