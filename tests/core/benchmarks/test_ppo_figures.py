"""The benchmark of PPO: what its sides run is PPO, and is the same."""

from pathlib import Path

import pytest
from benchmarks.ppo import build_sides, measure

from enginehouse_rl.config import load_config

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart"


def test_our_sides_run_the_quickstart_with_a_critic_and_gae():
    sides = build_sides(Path("bin/python"), Path("trl/bin/python"), Path("model"), steps=50)
    ours = [side for side in sides.values() if side.program == "enginehouse"]
    shares = []
    for side in ours:
        _, command, *words = map(str, side.command(Path("run"), 3))
        assert command == "train"
        config = load_config(QUICKSTART / "grpo.yaml", words[1:])
        shares.append(config.critic.shares)
        assert (config.critic.engine.options["lr"], config.actor.engine.options["lr"]) == (3e-3, 1.5e-3)
        assert (config.algorithm.advantage.name, config.algorithm.advantage.arguments) == ("gae", {"lam": 0.95})
        assert (config.train.steps, config.train.seed) == (50, 3)
    assert shares == ["actor", "actor", None]


def test_too_few_steps_are_refused():
    with pytest.raises(ValueError, match="steps=39"):
        measure(steps=39)
