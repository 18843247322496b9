"""The benchmark of PPO: what its sides run is PPO, and is the same."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from benchmarks.bare_grpo import Task, load
from benchmarks.bare_ppo import credits, load_critic, train
from benchmarks.ppo import build_sides, measure

from enginehouse.config import load_config
from enginehouse.data import Batch, Ragged
from enginehouse.rl.advantages.gae import gae

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart"


def test_our_sides_run_the_quickstart_with_a_critic_and_gae():
    sides = build_sides(Path("bin/python"), Path("trl/bin/python"), Path("model"), steps=50)
    ours = [side for side in sides.values() if side.program == "enginehouse"]
    assert len(ours) == 2
    for side in ours:
        _, command, *words = map(str, side.command(Path("run"), 3))
        assert command == "train"
        config = load_config(QUICKSTART / "grpo.yaml", words[1:])
        assert config.critic.shares == "actor"
        assert (config.critic.engine.options["lr"], config.actor.engine.options["lr"]) == (3e-3, 1.5e-3)
        assert (config.algorithm.advantage.name, config.algorithm.advantage.arguments) == ("gae", {"lam": 0.95})
        assert (config.train.steps, config.train.seed) == (50, 3)


def test_too_few_steps_are_refused():
    with pytest.raises(ValueError, match="steps=39"):
        measure(steps=39)


def test_the_hand_written_loops_advantages_are_those_of_gae():
    torch.manual_seed(0)
    lengths = torch.tensor([4, 1, 3])
    mask = (torch.arange(4) < lengths[:, None]).float()
    values, reward = torch.randn(3, 4), torch.tensor([1.0, 0.0, 1.0])
    advantages, returns = credits(reward, values, mask)
    flat = mask.bool()
    ours = gae(
        Batch(
            {
                "reward": reward,
                "loss_mask": Ragged.from_lengths(torch.ones(8, dtype=torch.bool), lengths),
                "token_rewards": Ragged.from_lengths(torch.zeros(8), lengths),
                "values": Ragged.from_lengths(values[flat], lengths),
            }
        ),
        lam=0.95,
    )
    torch.testing.assert_close(returns[flat], ours.ragged("returns").values, atol=1e-5, rtol=0)
    torch.testing.assert_close(advantages[flat], ours.ragged("advantages").values, atol=1e-5, rtol=0)
    assert not advantages[~flat].any()


def test_the_hand_written_loop_trains_model_and_critic(tmp_path):
    make_task = runpy.run_path(str(QUICKSTART / "make_task.py"))
    make_task["make_data"](tmp_path)
    make_task["make_model"](tmp_path / "model")
    model, tokenizer = load(tmp_path / "model")
    critic = load_critic(tmp_path / "model")
    before = [model.lm_head.weight.detach().clone(), critic.score.weight.detach().clone()]
    assert len(train(model, critic, Task.load(tmp_path, tokenizer), seed=0, steps=1)) == 1
    assert not torch.equal(model.lm_head.weight, before[0])
    assert not torch.equal(critic.score.weight, before[1])
