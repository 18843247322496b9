"""The quickstart on the `megatron` backend: it learns, and goes on in another layout."""

from __future__ import annotations

import pytest

from .conftest import Start
from .run_process import RunProcess

pytestmark = pytest.mark.slow

MEGATRON = (
    "actor.engine.backend=megatron",
    "actor.processes=2",
    "rollout.replicas=2",
    "algorithm.kl.coefficient=1e-3",  # a reference: a second engine in the actor's processes
    "actor.engine.options.schedule=constant",
    "train.validate_every=0",
    "train.checkpoint_every=30",
    "run.directory=runs/megatron",
)


def test_it_learns_split_by_matrices_and_goes_on_split_by_layers(start: Start, warmed_up: RunProcess):
    run = start("train", *MEGATRON, "train.steps=30", "actor.engine.options.tensor_parallel=2", name="megatron")
    ended = run.finish()
    assert ended.code == 0, ended.err
    assert ended.err == ""
    run = start(
        "train", *MEGATRON, "train.steps=45", "actor.engine.options.pipeline_parallel=2", "--resume", name="megatron"
    )
    ended = run.finish()
    assert ended.code == 0, ended.err
    rewards = [line["reward/mean"] for line in run.metrics]
    assert len(rewards) == 45
    assert sum(rewards[:5]) / 5 < 0.1
    assert sum(rewards[25:30]) / 5 > 0.2, rewards
    assert sum(rewards[30:35]) / 5 > 0.2, "what was learnt before is there after"
    assert sum(rewards[-5:]) / 5 > 0.25, rewards
    # Rollout and trainer score the same tokens with the same weights in either layout.
    assert all(line["mismatch/absolute_max"] < 1e-4 for line in run.metrics)
