"""The recipe `real/grpo` on the real model of `make real-model` (SmolLM2-135M-Instruct, 4 bits): `make test-real`."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from enginehouse.cli.main import main
from enginehouse_recipes.real_model import real_model

NEAR = 1e-4
"""Nats between a token's logprobs by rollout and actor, which both calculate in float32."""


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.timeout(900)
@pytest.mark.sources("plugins/recipes/src/enginehouse_recipes/real/")
def test_two_steps_are_rewarded_and_trained_on_what_was_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert real_model().exists(), "the real model is not made: make real-model"
    monkeypatch.chdir(tmp_path)
    shortly = ("train.steps=2", "train.prompts_per_step=4", "data.validation=null", "train.validate_every=0")
    inline = ("cluster.launcher=inline", "cluster.device=cpu")
    done = CliRunner().invoke(main, ["recipes", "run", "real/grpo", *shortly, *inline])
    assert done.exit_code == 0, done.output
    metrics = Path("runs/recipes/real/grpo/metrics.jsonl").read_text(encoding="utf-8")
    steps = [json.loads(line) for line in metrics.splitlines()]
    assert [step["step"] for step in steps] == [1, 2]
    assert steps[0]["reward/mean"] > 0
    assert steps[0]["grad_norm"] > 0
    assert all(step["mismatch/absolute_max"] < NEAR for step in steps)
