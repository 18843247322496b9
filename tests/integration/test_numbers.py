"""What a run does whose numbers are none any more: weights, gradients, the model's own file."""

from pathlib import Path

import pytest

from enginehouse_testing.models import with_weight

from .conftest import Start
from .run_process import RunFiles

pytestmark = pytest.mark.slow

ALONE = "cluster.launcher=inline"


@pytest.mark.essential
@pytest.mark.fault(
    area="numbers",
    what="an update leaves weights that are not finite (lr 1e30)",
    happens="the run ends at that optimizer step, and names the step, the parameters and what to try",
    exit_code="1",
    kept="checkpoints and models of earlier steps; nothing of the lost weights",
    noticed="in the step",
)
def test_weights_that_a_step_lost_are_never_served_or_saved(train: Start):
    run = train(
        ALONE,
        "train.steps=4",
        "train.checkpoint_every=1",
        "train.save_every=1",
        "actor.engine.options={lr: 1.0e+30, warmup_steps: 3, max_grad_norm: 1}",
        "reward.function=rewards:varied",
    )
    ended = run.finish()
    assert ended.code == 1, ended.err
    assert "'update' raised NonFiniteWeights: optimizer step 1 left weights that are not finite: model." in ended.err
    assert "Try a smaller lr" in ended.err
    assert run.metrics == []
    assert run.record["status"] == "failed"
    for kept in ("checkpoints", "models"):
        assert list(run.directory.glob(f"{kept}/step-*")) == [], kept


@pytest.mark.essential
@pytest.mark.fault(
    area="numbers",
    what="training makes the model worse, while more of its samples are right",
    happens="the run continues. Each validation (greedy by default) and the final summary say so",
    exit_code="0",
    kept="everything, including the responses of each validation",
    noticed="at the next validation",
)
def test_a_run_that_makes_the_model_worse_says_so(start: Start, warmed_up: RunFiles):
    options = ("actor.engine.options.lr=1.5e-3", "actor.engine.options.schedule=constant")
    run = start("train", ALONE, "train.steps=12", *options)
    ended = run.finished()
    before, after = run.validations
    assert before["validation/reward"] - after["validation/reward"] > 0.05
    rewards = [line["reward/mean"] for line in run.metrics]
    assert sum(rewards[-4:]) > 2 * sum(rewards[:4]), "drawn as in training, it looks better"
    said = [line for line in ended.out.splitlines() if "worse than before training" in line]
    assert [line.partition(": ")[0] for line in said] == ["validation at step 12, greedy", "validation/reward"]


@pytest.mark.fault(
    area="numbers",
    what="every optimizer step is skipped, as its gradient is not finite",
    happens="an alarm warns of the first. After three such steps in a row the run ends",
    exit_code="1",
    kept="metrics and models; weights are as before the first skipped step",
    noticed="in the first step",
)
def test_a_run_of_nothing_but_skipped_steps_ends(train: Start):
    run = train(ALONE, "train.steps=9", "algorithm.loss={name: 'losses:not_a_number', arguments: {}}")
    ended = run.finish()
    assert ended.code == 1, ended.err
    assert "step 1: 1 of 1 optimizer steps were skipped, as their gradient was not finite" in ended.err
    assert "every optimizer step of steps 1 to 3 was skipped" in ended.err
    assert len(run.metrics) == 3


@pytest.mark.fault(
    area="numbers",
    what="weights in the model's file are not finite",
    happens="the run does not start; the message names the parameter and the file",
    exit_code="2",
    kept="the run's directory, without a step",
    noticed="when the model is loaded",
)
def test_a_model_that_is_not_finite_is_refused_by_parameter_and_file(train: Start, house: Path):
    name = "model.layers.0.mlp.up_proj.weight"
    path = with_weight(str(house / "examples/quickstart/work/model"), name, (0, 0), float("nan"))
    ended = train(ALONE, f"model.path={path}").finish()
    assert ended.code == 2, ended.err
    assert f"the model's weights are not finite (NaN or infinite): {name} in {path}/model.safetensors" in ended.err
