"""Rows between nodes, and rows whose node leaves: two real Ray nodes on this machine."""

import pytest
import torch
from controller_shards import Writer
from ray_programs import ClusterProgram, kill_node

from enginehouse.controller import DataLost, RemoteError, ResourcePool, WorkerDied, WorkerGroup, WorkerSpec
from enginehouse.data import Batch

pytestmark = pytest.mark.slow


@pytest.fixture
def cluster():
    program = ClusterProgram({"num_cpus": 4}, {"num_cpus": 3})
    yield program
    program.end()


def test_rows_go_between_nodes_and_those_of_a_lost_node_are_named(cluster):
    seen = cluster.run(_lose_a_node)
    assert seen["before"] == [0, 1, 2, 3, 4, 5]
    assert seen["a copy"] == [0, 1, 2, 3, 4, 5], "what another node has read is there"
    assert len(seen["lost"]) == len(seen["kept"]) == 3
    assert seen["rows on the node that stayed"] == seen["kept"]
    role, what = (
        f"writers rank {seen['lost'][0]} on node ",
        "'write' is lost: its node has left the cluster",
    )
    assert all(part in seen["fetch"] for part in (role, what))
    assert all(part in seen["call"] for part in ("readers rank", role, what))
    assert seen["cause"] is DataLost
    assert seen["numbers held here"] == [0, 1, 2, 3, 4, 5], "what the controller holds is not lost"
    assert "rank" in seen["group"]
    assert seen["reader afterwards"] == [6]


def _lose_a_node():
    import ray

    plain = WorkerSpec(Writer).options(distributed=False)
    writing, reading = ResourcePool([3, 3]), ResourcePool([1])
    writers = WorkerGroup(writing, plain, name="writers", timeout=120)
    readers = WorkerGroup(reading, plain, name="readers", timeout=120)
    prompts = Batch({"number": torch.arange(6)})
    read_before, made = writers.write(prompts), writers.write(prompts)
    seen = {"before": readers.same(read_before).fetch(["number", "padding"])["number"].tolist()}
    head, nodes = ray.get_runtime_context().get_node_id(), writers.execute_all("node_id")
    lost = [rank for rank, node in enumerate(nodes) if node != head]
    kept = [rank for rank, node in enumerate(nodes) if node == head]
    kill_node(nodes[lost[0]], and_wait=True)
    seen["a copy"] = read_before.fetch()["number"].tolist()
    seen["kept"], seen["lost"] = kept, lost  # a rank has one row
    seen["rows on the node that stayed"] = made.take(kept).fetch()["number"].tolist()
    with pytest.raises(DataLost) as missed:
        made.fetch()
    seen["fetch"] = str(missed.value)
    with pytest.raises(RemoteError) as told:
        readers.same(made)
    seen["call"], seen["cause"] = str(told.value), type(told.value.cause)
    seen["numbers held here"] = made.column("number").tolist()
    with pytest.raises(WorkerDied) as died:
        writers.same(prompts)
    seen["group"] = str(died.value)
    seen["reader afterwards"] = readers.count(prompts)
    for group in (writers, readers):
        group.shutdown()
    for pool in (writing, reading):
        pool.shutdown()
    return seen
