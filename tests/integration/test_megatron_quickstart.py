"""The quickstart on the `megatron` backend: it learns in each layout, goes on in another, and as fsdp does."""

from collections.abc import Callable

import pytest

from .conftest import Start
from .run_process import RunFiles, RunProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

MEGATRON = (
    "actor.engine.backend=megatron",
    "actor.processes=2",
    "rollout.replicas=2",
    "algorithm.kl.coefficient=1e-3",  # a reference: a second engine in the actor's processes
    "actor.engine.options.schedule=constant",
    "train.validate_every=0",
)


@pytest.mark.parametrize(
    "steps", [pytest.param((5, 9), marks=pytest.mark.essential), (15, 25)], ids=["goes on", "learns"]
)
def test_it_learns_split_by_matrices_and_goes_on_split_by_layers(start: Start, warmed_up: RunFiles, steps):
    (first, both), name = steps, f"megatron-{steps[0]}"
    same = (*MEGATRON, f"train.checkpoint_every={first}", f"run.directory=runs/{name}")
    run = start("train", *same, f"train.steps={first}", "actor.engine.options.tensor_parallel=2", name=name)
    assert run.finished().err == ""
    layers = "actor.engine.options.pipeline_parallel=2"
    run = start("train", *same, f"train.steps={both}", layers, "--resume", name=name)
    run.finished()
    rewards = [line["reward/mean"] for line in run.metrics]
    assert len(rewards) == both
    # Rollout and trainer score the same tokens with the same weights in either layout.
    assert all(line["mismatch/absolute_max"] < 1e-4 for line in run.metrics)
    assert all(line["grad_norm"] > 0 for line in run.metrics)
    if both == 25:
        assert sum(rewards[:5]) / 5 < 0.1
        assert sum(rewards[10:15]) / 5 > 0.1, rewards
        assert sum(rewards[15:20]) / 5 > 0.12, "what was learnt before is there after"
        assert sum(rewards[-5:]) / 5 > 0.2, rewards


STEPS = 25
FROM_SCRATCH = (
    "data.validation=null",
    "train.validate_every=0",
    "actor.engine.options.schedule=constant",
)
LAYOUTS = {
    "pp2": ("actor.processes=2", "rollout.replicas=2", "actor.engine.options.pipeline_parallel=2"),
    "tp2-dp2": ("actor.processes=4", "rollout.replicas=4", "actor.engine.options.tensor_parallel=2"),
    "tp2-vllm": ("actor.processes=2", "rollout.engine.backend=vllm", "actor.engine.options.tensor_parallel=2"),
}


@pytest.fixture(scope="module")
def run_in(start: Start, warmed_up: RunFiles) -> Callable[[str, int], RunProcess]:
    """Runs the quickstart in a layout for so many steps, and returns the run at its end."""

    def run(layout: str, steps: int) -> RunProcess:
        run = start("train", "actor.engine.backend=megatron", *FROM_SCRATCH, f"train.steps={steps}", *LAYOUTS[layout])
        ended = run.finished(600)
        assert ended.err == ""
        return run

    return run


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_learns_from_scratch_in_a_layout(run_in, layout: str):
    metrics = run_in(layout, STEPS).metrics
    rewards = [line["reward/mean"] for line in metrics]
    assert len(rewards) == STEPS
    assert sum(rewards[:5]) / 5 < 0.1
    assert sum(rewards[-5:]) / 5 > 0.2, rewards
    assert max(line["mismatch/absolute_max"] for line in metrics) < 1e-4


def test_the_first_steps_have_the_rewards_that_fsdp_has_from_the_same_seed(start: Start, run_in):
    run = start(
        "train", "actor.engine.backend=fsdp", *FROM_SCRATCH, "actor.processes=2", "rollout.replicas=2", "train.steps=5"
    )
    run.finished()
    for ours, theirs in zip(run_in("pp2", 5).metrics, run.metrics, strict=True):
        assert ours["reward/mean"] == theirs["reward/mean"], "the same samples, to the last token"
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
        for name in ("loss", "policy_kl", "ratio", "clip_fraction", "entropy"):
            assert ours[name] == pytest.approx(theirs[name], abs=1e-5), name
