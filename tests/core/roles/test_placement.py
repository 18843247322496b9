"""Which workers are started when a plan is placed, what they share, and what they are told."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from projects import Project

from enginehouse.controller import PlacementError
from enginehouse.controller.cluster import Cluster
from enginehouse.engines.model import ModelSpec
from enginehouse.plugin import load_plugins
from enginehouse.roles import placement
from enginehouse.runtimes import Interpreter
from enginehouse_rl.config.load import load_config
from enginehouse_rl.config.schema import SFTConfig
from enginehouse_rl.plan.plan import Plan, RunPlan, plan_sft


class Started:
    """Stands in for what starts processes, and for the groups it would give: nothing is started."""

    def __init__(self) -> None:
        self.colocated: list[dict[str, Any]] = []
        self.fleets: dict[str, int] = {}
        self.devices: dict[str, tuple[str, int]] = {}  # of each fleet, its device and the GPUs of a replica
        self.options: dict[str, dict[str, Any]] = {}
        self.pools: list[list[int]] = []
        self.launched: list[str] = []
        self.connected: list[tuple[Any, ...]] = []

    def group(self, name: str) -> Any:
        return SimpleNamespace(
            name=name,
            launch=lambda: self.launched.append(name),
            shutdown=lambda: None,
            call=lambda method: f"{method} of {name}",
        )

    def colocate(self, pool: Any, specs: dict[str, Any], **options: Any) -> dict[str, Any]:
        self.colocated.append(dict(specs))
        self.options["+".join(specs)] = options
        return {name: self.group(name) for name in specs}

    def pool(self, nodes: list[int], **options: Any) -> Any:
        self.pools.append(nodes)
        return SimpleNamespace(shutdown=lambda: None, gpus=options.get("gpus_per_process", 0))

    def fleet(self, name: str, replicas: int) -> Any:
        self.fleets[name] = replicas
        return self.group(name)

    def sync(self, actor: Any, rollout: Any, transport: str, **options: Any) -> Any:
        self.connected.append((actor.name, rollout.name, transport))
        return SimpleNamespace(connect=lambda: None, close=lambda: None, catch_up=None)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    started = Started()

    class Fleet:
        """Stands in for `RolloutFleet`."""

        def __init__(self, spec: Any, replicas: int, *, name: str, **options: Any):
            started.options[name] = options
            vars(self).update(vars(started.fleet(name, replicas)))
            started.devices[name] = options["device"], options["places"].gpus

        @staticmethod
        def from_group(group: Any) -> Any:
            return group

    monkeypatch.setattr(placement, "colocate", started.colocate)
    monkeypatch.setattr(placement, "ResourcePool", started.pool)
    monkeypatch.setattr(placement, "RolloutFleet", Fleet)
    monkeypatch.setattr(placement, "WeightSync", started.sync)
    return started


Make = Callable[..., Plan]


def started_roles(plan: RunPlan, **how: Any) -> AbstractContextManager[placement.Roles]:
    return placement.place(plan.roles, plan.launch, **how)


@pytest.fixture
def make(project: Project) -> Make:
    return partial(project.planned, "cluster.launcher=inline")


def test_roles_that_share_processes_are_started_together(make: Make, started: Started):
    with started_roles(make("algorithm.kl.coefficient=0.1")) as roles:
        assert roles.describe() == {name: f"describe of {name}" for name in ("actor", "reference", "rollout")}
        assert list(roles.trained) == ["actor"]
    assert [list(specs) for specs in started.colocated] == [["actor", "reference", "rollout"]]
    assert (started.pools, started.fleets, started.launched) == ([[1]], {}, ["rollout"])
    assert started.connected == [("actor", "rollout", "inproc")]


def test_a_rollout_of_its_own_is_a_fleet(make: Make, started: Started):
    came: list[str] = []
    with started_roles(make("rollout.placement=separate"), came=came.append):
        assert came == ["1 process of actor", "1 process of rollout", "the engine of rollout"]
    assert [list(specs) for specs in started.colocated] == [["actor"]]
    assert (started.fleets, started.launched) == ({"rollout": 1}, ["rollout"])


def test_a_supervised_run_is_an_actor_without_weight_updates(project: Project, started: Started):
    path = project.save_sft()
    config = load_config(path, ("cluster.launcher=inline",), SFTConfig)
    with started_roles(plan_sft(config, load_plugins(enabled=("torch",)), path)) as roles:
        assert list(roles.groups) == list(roles.trained) == ["actor"]
    assert [list(specs) for specs in started.colocated] == [["actor"]]
    assert started.connected == []


@pytest.mark.parametrize("seed", [0, 7, 2**63 - 1])
def test_the_seed_of_a_run_reaches_new_weights(make: Make, started: Started, seed: int):
    with started_roles(make(f"train.seed={seed}", "algorithm.kl.coefficient=0.1")):
        pass
    (specs,) = started.colocated
    assert specs.keys() == {"actor", "reference", "rollout"}
    for spec in specs.values():
        model = next(one for one in spec.args if isinstance(one, ModelSpec))
        assert model.seed == seed


@pytest.mark.slow
def test_a_reference_of_its_own_is_a_group_in_processes_of_its_own(make: Make, started: Started):
    planned = make("algorithm.kl.coefficient=0.1", "cluster.launcher=ray", "reference.processes=2")
    with started_roles(planned) as roles:
        assert list(roles.groups) == ["actor", "reference"]
    assert [list(specs) for specs in started.colocated] == [["actor", "rollout"], ["reference"]]
    assert started.pools == [[1], [2]]


@pytest.mark.slow
def test_variables_of_a_role_are_read_from_the_environment_as_it_starts(make, started, monkeypatch):
    monkeypatch.setenv("INTERFACE", "eth0")
    planned = make("cluster.launcher=ray", "actor.engine.env={NCCL_SOCKET_IFNAME: '${INTERFACE}'}")
    assert planned.roles["actor"].env == {"NCCL_SOCKET_IFNAME": "${INTERFACE}"}
    with started_roles(planned):
        pass
    (specs,) = started.colocated
    assert specs["actor"].variables == {"NCCL_SOCKET_IFNAME": "eth0"}


@pytest.mark.parametrize(
    ("engine", "placed"), [("{endpoint: [http://there:30000]}", ("cpu", 0)), ("{tensor_parallel: 2}", ("cuda", 2))]
)
def test_what_only_talks_to_servers_that_run_already_needs_no_gpu(project, started, monkeypatch, engine, placed):
    monkeypatch.setattr(placement, "start_ray", lambda address: nullcontext(Cluster(owned=True)))
    monkeypatch.setattr(placement, "Room", SimpleNamespace(of_cluster=lambda: None))
    monkeypatch.setattr("enginehouse_rl.plan.parts.placement.visible_gpus", lambda: 3)
    monkeypatch.setattr("enginehouse_rl.plan.parts.engines.choose_runtime", lambda *_: Interpreter("current"))
    overrides = (
        "cluster.device=cuda",
        "rollout.engine.backend=sglang",
        f"rollout.engine.options={engine}",
        "rollout.placement=separate",
        "cluster.threads_per_process=1",
    )
    with started_roles(project.planned(*overrides, enabled=("torch", "sglang"))):
        pass
    assert started.devices == {"rollout": placed}


def test_a_run_planned_on_a_cpu_head_node_does_not_leave_the_clusters_gpus_idle(project, started, monkeypatch):
    def begin(owned: bool, gpus: int, *overrides: str) -> None:
        monkeypatch.setattr(placement, "start_ray", lambda address: nullcontext(Cluster(owned)))
        monkeypatch.setattr(placement, "Room", SimpleNamespace(of_cluster=lambda: None))
        monkeypatch.setattr(placement, "count_gpus", lambda: gpus)
        monkeypatch.setattr("enginehouse_rl.plan.device.visible_gpus", lambda: 0)
        given = ("cluster.device=auto", "cluster.address=head:6379", *overrides)
        with started_roles(project.planned(*given)) as roles:
            assert roles.groups

    with pytest.raises(PlacementError, match=r"the cluster has 8 GPUs: set cluster\.device=cuda, or cpu"):
        begin(False, 8)
    assert not started.colocated
    begin(False, 0)
    begin(False, 8, "cluster.device=cpu")
    begin(True, 8)  # Ray counts what this machine has, and this torch cannot use it


def test_a_replica_is_given_an_eighth_more_completions_than_its_engine_generates_at_once(make: Make, started: Started):
    with started_roles(make("rollout.placement=separate", "rollout.engine.options.max_running=80")):
        pass
    assert started.options["rollout"]["samples_in_flight"] == 90


@pytest.mark.parametrize(
    ("overrides", "cores", "threads"),
    [
        ([], 24, 1),
        (["cluster.threads_per_process=3"], 24, 3),
        (["cluster.device=cuda"], 24, 8),
        (["cluster.device=cuda"], 5, 5),
        (["cluster.device=cuda", "cluster.threads_per_process=1"], 24, 1),
    ],
)
def test_a_process_beside_a_gpu_has_its_share_of_the_cores(make, started, monkeypatch, overrides, cores, threads):
    monkeypatch.setattr("enginehouse_rl.plan.parts.placement.visible_gpus", lambda: 8)
    monkeypatch.setattr(placement, "cores_per_gpu", lambda: cores)
    monkeypatch.setattr(placement, "start_ray", lambda address: nullcontext(Cluster(owned=True)))
    monkeypatch.setattr(placement, "Room", SimpleNamespace(of_cluster=lambda: None))
    planned = make("cluster.launcher=ray", "rollout.placement=separate", *overrides)
    with started_roles(planned):
        pass
    assert {name: options["threads"] for name, options in started.options.items()} == {
        "actor": threads, "rollout": threads,
    }  # fmt: skip
