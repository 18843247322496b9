"""A reference on an engine and processes of its own: it scores as one beside the actor does, and a run uses it."""

import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from enginehouse.data import Batch, Ragged
from enginehouse.engines.train import Outputs
from enginehouse.plugin import configure_plugins
from enginehouse.roles.placement import place
from enginehouse_rl.config.load import load_config
from enginehouse_rl.plan.plan import plan

from .conftest import QUICKSTART, SMALL, Start

pytestmark = pytest.mark.slow

KL = "algorithm.kl={coefficient: 0.01, place: reward}"
APART = ("reference.engine.backend=fsdp", "reference.processes=2")


def logprobs(house: Path, *overrides: str) -> torch.Tensor:
    """What the reference of a run gives for three rows of tokens."""
    config = house / QUICKSTART / "grpo.yaml"
    own = ("reference.path=another-model", "run.directory=runs/another-model")
    loaded = load_config(config, (*SMALL, KL, *own, *overrides))
    rows = Ragged.from_list([[3, 5, 7, 9], [4, 6], [8, 8, 3, 5, 2, 1, 7]])
    batch = Batch({"input_ids": rows, "loss_mask": rows.like(torch.ones(rows.tokens, dtype=torch.bool))})
    planned = plan(loaded, configure_plugins(), config)
    with place(planned.roles, planned.launch) as roles:
        scored = roles.score_by_reference(batch, Outputs()).column("reference_logprobs").values.clone()
        policy = roles.actor.forward(batch, Outputs()).column("logprobs").values.clone()
        assert len(roles.groups["reference"].pids) == (loaded.reference.processes or 1)
    assert (scored - policy).abs().max() > 0.01  # it is another model
    return scored


def test_logprobs_of_an_engine_apart_are_those_of_one_beside_the_actor(house: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(house)
    shutil.copytree("examples/quickstart/work/model", "another-model")
    weights = load_file("another-model/model.safetensors")
    draw = torch.Generator().manual_seed(3)
    changed = {name: one + 0.05 * torch.randn(one.shape, generator=draw).to(one) for name, one in weights.items()}
    save_file(changed, "another-model/model.safetensors", {"format": "pt"})
    beside = logprobs(house, "cluster.launcher=inline")
    apart = logprobs(house, *APART)
    torch.testing.assert_close(apart, beside, rtol=0, atol=1e-5)
    assert beside.abs().max() > 0.1


def test_a_run_with_a_kl_term_and_a_reference_apart(train: Start):
    run = train(KL, *APART, "reward.function=rewards:varied", "train.steps=3")
    ended = run.finished()
    assert "fsdp, 2 ranks, in separate processes" in ended.out
    lines = run.metrics
    assert lines[0]["kl"] == pytest.approx(0, abs=1e-5)  # the actor still is the reference
    assert math.isfinite(lines[-1]["kl"])
    assert lines[-1]["kl"] > lines[0]["kl"]
    assert lines[-1]["kl"] > 1e-6  # more than rounding: the policy moved and the reference did not
    assert len({run.pid("actor"), run.pid("reference", 0), run.pid("reference", 1)}) == 3
