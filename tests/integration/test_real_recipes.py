"""Recipes of `real/` beside `real/grpo`, each in short, on the real model of `make real-model`: `make test-real`."""

import json
import math
from pathlib import Path

import pytest
from click.testing import CliRunner

from enginehouse.cli.main import main
from enginehouse_recipes.real_model import NAME, real_model

NEAR = 1e-4
"""Nats between a token's logprobs by rollout and actor, which both calculate in float32."""


pytestmark = [
    pytest.mark.slow,
    pytest.mark.real,
    pytest.mark.timeout(900),
    pytest.mark.sources("plugins/recipes/src/enginehouse_recipes/real/"),
]


@pytest.fixture(autouse=True)
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current directory is empty, and the real model is made."""
    assert real_model().exists(), "the real model is not made: make real-model"
    monkeypatch.chdir(tmp_path)


def run_shortly(recipe: str, steps: int, *overrides: str) -> list[dict[str, float]]:
    """Run a recipe without validations in this process. Return the metrics of its steps."""
    shortly = (f"train.steps={steps}", "data.validation=null", "train.validate_every=0")
    inline = ("cluster.launcher=inline", "cluster.device=cpu")
    done = CliRunner().invoke(main, ["recipes", "run", recipe, *shortly, *overrides, *inline])
    assert done.exit_code == 0, done.output
    metrics = Path(f"runs/recipes/{recipe}/metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in metrics.splitlines()]


def test_demonstrations_are_learned_from_at_once():
    first, *_, last = run_shortly("real/sft", 4, "train.rows_per_step=8")
    assert last["loss"] < first["loss"]


def test_pairs_are_judged_against_the_model_that_a_run_begins_from():
    untrained = f"model.path=runs/recipes/{NAME}"
    warm = "actor.engine.options.warmup_steps=0"
    first, second = run_shortly("real/dpo", 2, untrained, warm, "train.rows_per_step=4")
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    # A reference that followed the actor would give the same again. The rows are others, so the loss may also rise.
    assert abs(second["loss"] - first["loss"]) > 1e-3


@pytest.mark.parametrize("recipe", ["real/lora", "real/ppo", "real/agent"])
def test_a_second_step_is_drawn_from_the_weights_that_the_first_made(recipe: str):
    few = ("train.prompts_per_step=1", "rollout.samples_per_prompt=2")
    steps = run_shortly(recipe, 2, *few)
    assert all(step["mismatch/absolute_max"] < NEAR for step in steps)


def test_its_own_chat_template_tells_of_no_tools():
    overrides = ("environment.arguments.format=auto", "train.steps=1")
    done = CliRunner().invoke(main, ["recipes", "run", "real/agent", *overrides])
    assert done.exit_code == 2
    assert "the model's tokenizer writes no tool calls, or writes them in an unknown format" in done.stderr
