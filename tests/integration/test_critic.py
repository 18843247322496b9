"""PPO: a critic is trained beside the actor, alone at first if it is to be, and goes on where it stood."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from .conftest import Start
from .run_process import RunProcess, finished

pytestmark = pytest.mark.slow

PPO = ("algorithm.advantage={name: gae, arguments: {lam: 0.9}}", "reward.function=rewards:varied")
INLINE = "cluster.launcher=inline"
KL = "algorithm.kl={coefficient: 0.01, place: reward}"


def figures(run: RunProcess) -> list[dict[str, float]]:
    """What the steps computed: their metrics without what a clock measured and what was sent when."""
    left_out = ("time/", "busy/", "rollout/", "weights/", "elapsed_seconds", "tokens_per_second")
    return [{name: value for name, value in row.items() if not name.startswith(left_out)} for row in run.metrics]


def test_a_critic_learns_beside_the_actor_and_in_processes_of_its_own(train: Start):
    task = (*PPO, KL, "train.steps=4", "algorithm.minibatches=2")
    beside = finished(train(*task, INLINE))
    assert all(math.isfinite(value) for line in beside.metrics for value in line.values() if value is not None)
    assert all(line["critic/grad_norm"] > 0 and line["critic/optimizer_steps"] == 2 for line in beside.metrics)
    assert beside.metrics[-1]["critic/loss"] < beside.metrics[0]["critic/loss"]
    apart = finished(train(*task, "critic.processes=2", "reference.shares=critic"))
    assert apart.pid("reference") == apart.pid("critic") != apart.pid("actor")
    for ours, theirs in zip(figures(apart), figures(beside), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5)


def test_the_actor_stays_as_it_is_while_the_critic_warms_up(train: Start, house: Path):
    run = finished(train(*PPO, INLINE, "train.steps=3", "critic.warmup_steps=2", "train.save_every=2"))
    before = load_file(house / "examples/quickstart/work/model/model.safetensors")
    warm, after = (load_file(run.directory / "models" / f"step-{step:06}/model.safetensors") for step in (2, 3))
    assert all(torch.equal(before[name], warm[name]) for name in before)
    assert not all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_sharded_engines_train_a_critic_beside_the_actor_as_torch_does(train: Start, backend: str):
    task = (*PPO, "train.steps=2", "actor.engine.options={lr: 1.0e-3}", "critic.shares=actor")
    of_torch = finished(train(*task, "critic.engine.options={lr: 3.0e-3}", INLINE))
    engines = (f"actor.engine.backend={backend}", f"critic.engine={{backend: {backend}, options: {{lr: 3.0e-3}}}}")
    sharded = finished(train(*task, *engines, "actor.processes=2", "rollout.placement=separate"))
    assert sharded.metrics[0]["critic/lr"] == 3e-3
    first = {name: value for name, value in figures(of_torch)[0].items() if name.startswith(("critic/", "reward/"))}
    for name, value in first.items():
        assert sharded.metrics[0][name] == pytest.approx(value, rel=1e-3, abs=1e-4), name
    assert sharded.metrics[1]["critic/loss"] == pytest.approx(of_torch.metrics[1]["critic/loss"], rel=1e-2)
