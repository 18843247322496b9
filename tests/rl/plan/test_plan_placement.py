"""Where the rollout goes on one GPU, on eight, and on more than are there; the GPUs are pretended."""

import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint

import pytest
from projects import Project, refusal

from enginehouse.plugin import load_plugins
from enginehouse_rl.config.load import load_config
from enginehouse_rl.plan.plan import Plan, plan

ENGINES = """
from enginehouse.engines.options import SplitRolloutOptions, TrainOptions
from enginehouse.plugin import RolloutBackend, TrainBackend, hookimpl

enginehouse_protocol = "1.0"

@hookimpl
def enginehouse_register_backends(register):
    rollout = dict(engine="enginehouse_torch.rollout:TorchRolloutEngine", options="placed_engines:SplitRolloutOptions")
    register(RolloutBackend(name="sleeps", capabilities={"sleep"}, **rollout))
    register(RolloutBackend(name="sleepless", **rollout))
    register(TrainBackend(name="stays", engine="enginehouse_torch.train:TorchTrainEngine",
                          options="enginehouse_torch.options:TorchTrainOptions"))
"""

SLEEPS = "rollout.engine.backend=sleeps"
SLEEPLESS = "rollout.engine.backend=sleepless"
FSDP = "actor.engine.backend=fsdp"


@pytest.fixture
def on_gpus(project: Project, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Plan]:
    """Plans the project's config on so many GPUs, with a rollout engine that can be split, and sleep or not."""
    (project.root / "placed_engines.py").write_text(ENGINES)
    sys.path.insert(0, str(project.root))
    declared = {"torch": "enginehouse_torch.plugin", "fsdp": "enginehouse_fsdp.plugin", "placed": "placed_engines"}
    plugins = load_plugins(entry_points=[EntryPoint(name, module, "enginehouse") for name, module in declared.items()])

    def on_gpus(number: int, *overrides: str) -> Plan:
        monkeypatch.setattr("enginehouse_rl.plan.parts.placement.visible_gpus", lambda: number)
        return plan(load_config(project.save(), ["cluster.device=cuda", *overrides]), plugins)

    return on_gpus


def split(replicas: int, each: int) -> list[str]:
    return [f"rollout.replicas={replicas}", f"rollout.engine.options.tensor_parallel={each}"]


def where(planned: Plan) -> str:
    rollout = planned.roles["rollout"]
    return f"in {rollout.shares}" if rollout.shares else f"on {rollout.devices_of or 'its own'}"


@pytest.mark.parametrize(
    ("gpus", "overrides", "expected"),
    [
        pytest.param(1, [], "in actor", id="a1: torch and torch"),
        pytest.param(1, [FSDP], "in actor", id="a1': fsdp and torch"),
        pytest.param(1, [FSDP, SLEEPS], "on actor", id="a2: fsdp and an engine of its own processes, on one GPU"),
        pytest.param(8, [FSDP, SLEEPS, "actor.processes=4", *split(2, 2)], "on its own", id="b1: four and four"),
        pytest.param(8, [FSDP, SLEEPS, "actor.processes=8", *split(4, 2)], "on actor", id="b2: eight and eight"),
        pytest.param(8, [FSDP, SLEEPS, "actor.processes=8", *split(1, 8)], "on actor", id="split over all eight"),
        pytest.param(2, [SLEEPS, "rollout.placement=shared"], "on actor", id="asked for where both would fit"),
        pytest.param(2, [SLEEPLESS], "on its own", id="an engine that cannot sleep has its own"),
    ],
)
def test_devices_are_shared_where_they_do_not_suffice_for_both(on_gpus, gpus, overrides, expected):
    assert where(on_gpus(gpus, *overrides)) == expected


def test_a_plan_says_why_devices_are_shared(on_gpus):
    (said,) = [text for title, text in on_gpus(1, FSDP, SLEEPS).facts if title == "rollout"]
    assert said.endswith(
        "taking turns with the actor on its devices (the engine needs its own process; 1 visible GPU, but 2 are "
        "needed if the rollout has its own)"
    )


def test_other_roles_count_where_gpus_are_short(on_gpus):
    beside = [SLEEPS, "actor.processes=2", *split(2, 1), "algorithm.kl.coefficient=0.1", "reference.processes=2"]
    assert where(on_gpus(6, *beside)) == "on its own"
    assert where(on_gpus(4, *beside)) == "on actor"


def test_an_evaluation_with_an_engine_of_its_own_counts_too(on_gpus):
    beside = [FSDP, SLEEPS, "evaluation.engine.backend=sleepless", "data.validation=train.jsonl"]
    assert where(on_gpus(3, *beside)) == "on its own"
    assert where(on_gpus(2, *beside)) == "on actor"


SHARED = "rollout.placement=shared"


@pytest.mark.parametrize(
    ("gpus", "overrides", "reason", "cure"),
    [
        (
            1,
            [FSDP, SLEEPLESS],
            "but only 1 is visible on this machine; actor and rollout cannot",
            "'sleepless' cannot release",
        ),
        (1, ["actor.engine.backend=stays", SLEEPS], "cannot take turns on these GPUs, because engine 'stays'", ""),
        (1, [FSDP, SLEEPS, "train.staleness=1"], "cannot take turns on these GPUs, because train.staleness is 1", ""),
        (2, [SLEEPS, SHARED, "train.staleness=1"], "shared, but actor and rollout cannot take turns: train", "set"),
        (2, [SLEEPLESS, SHARED], "engine 'sleepless' cannot release its memory", "set rollout.placement=auto"),
        (8, [SLEEPS, SHARED, "actor.processes=4", *split(4, 2)], "need the devices of 8 processes", "replicas=2"),
        (
            8,
            [SLEEPS, SHARED, "actor.processes=2", *split(1, 4)],
            "of the actor, but the actor has 2",
            "actor.processes=4",
        ),
        (8, [FSDP, SLEEPS, "actor.processes=16", *split(8, 2)], "needs 16 GPUs (actor 16), but only 8 are visible", ""),
        (
            8,
            [
                SLEEPS,
                SHARED,
                "algorithm.kl.coefficient=0.1",
                "reference.engine.backend=stays",
                "reference.shares=actor",
            ],
            "takes turns with the reference, but engine 'stays' cannot",
            "(reference.processes)",
        ),
    ],
)
def test_what_cannot_share_devices_is_refused_with_a_cure(on_gpus, gpus, overrides, reason, cure):
    said = refusal(on_gpus, gpus, *overrides)
    assert reason in said
    assert cure in said.partition(reason)[2]
