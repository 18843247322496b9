"""PPO end to end: enginehouse, controller and Ray included, against TRL's `PPOTrainer`, on the quickstart.

It is set up as `benchmarks.grpo`, with the same model, warmed up once, and the same task, prompts and samples per step,
new tokens and optimizer steps. Its critic begins as the same model with a new head. TRL 1.12 is the last release with a
`PPOTrainer`; `trl_ppo.py` says what cannot be made the same. A hand-written loop is the floor.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.environments import ROOT, checkout, environment, versions
from benchmarks.runs import QUICKSTART, prepare, quickstart
from benchmarks.sides import (
    WARM_UP_STEPS,
    Side,
    compare,
    final_reward,
    final_rewards,
    read_enginehouse,
    read_step_seconds,
    row,
    run_in_turn,
)

WORK = ROOT / "benchmarks" / "out" / "ppo"
PPO = (
    "actor.engine.options.lr=1.5e-3",
    "algorithm.advantage.name=gae",
    "algorithm.advantage.arguments={lam: 0.95}",
    "critic.shares=actor",
    "critic.engine.backend=torch",
    "critic.engine.options={lr: 3.0e-3, weight_decay: 0.0, max_grad_norm: 1.0, warmup_steps: 5, schedule: linear}",
)
"""Overrides that turn the quickstart's config into PPO."""


def measure(rounds: int = 3, steps: int = 250, seed: int = 0, own_environment: bool = True) -> dict[str, Any]:
    """Run every side `rounds` times in turn.

    Args:
        rounds: runs of each side; round `i` uses seed `seed + i`.
        steps: optimizer steps of a run.
        seed: seed of task, first weights and warm-up.
        own_environment: True to make a Python environment for enginehouse; otherwise the running one is used.

    Returns:
        `metrics`, `sides`, `versions`. Metrics: `steps_per_second_vs_peer`, `controller_share` (fraction of our step
        spent in no engine), and steps per second and final reward by program.

    Raises:
        ValueError: there are too few steps to time any.
        RuntimeError: a side failed; the message has the last lines that it printed.
    """
    if steps < 2 * WARM_UP_STEPS:
        raise ValueError(f"steps={steps}: the first {WARM_UP_STEPS} are not timed; at least twice as many are needed")
    trl = environment("trl_ppo", ["torch"], ["trl==1.12.*", "pandas"])
    ours = checkout() if own_environment else Path(sys.executable)
    start = prepare(ours, WORK, seed)
    sides = build_sides(ours, trl, start, steps)
    run_in_turn(sides, WORK, rounds, seed)
    rewards = final_rewards(sides, WORK / "task")
    return {
        "metrics": compare(sides, rewards, {"steps_per_second_vs_peer": ("enginehouse", "TRL")}),
        "sides": {name: row(side, rewards[name]) for name, side in sides.items()},
        "reward_before": final_reward(start, WORK / "task"),
        "versions": {
            "enginehouse": versions(ours, "torch", "transformers", "ray"),
            "trl": versions(trl, "torch", "transformers", "trl", "accelerate"),
        },
    }


def build_sides(ours: Path, trl: Path, start: Path, steps: int) -> dict[str, Side]:
    """Return the sides by name, in the order of the first round."""

    def enginehouse(*overrides: str) -> Side:
        def command(directory: Path, seed: int) -> Sequence[object]:
            return [*quickstart(ours, WORK, start, directory, steps, seed), *PPO, *overrides]

        return Side("enginehouse", command, read_enginehouse)

    def peer(program: str, threads: int, *script: object) -> Side:
        def command(directory: Path, seed: int) -> Sequence[object]:
            shared = ["--task", WORK / "task", "--model", start, "--steps", steps, "--seed", seed]
            return [*script, *shared, "--threads", threads, "--save", directory]

        return Side(program, command, read_step_seconds, threads)

    trl_script = (trl, "benchmarks/trl_ppo.py", "--reward", f"{QUICKSTART / 'reward.py'}:sorted_digits")
    return {
        "enginehouse, 1 process of 2 threads": enginehouse("actor.processes=1", "cluster.threads_per_process=2"),
        "TRL, 2 threads": peer("TRL", 2, *trl_script),
        "enginehouse, 2 processes of 1 thread": enginehouse(
            "actor.processes=2", "rollout.replicas=2", "cluster.threads_per_process=1"
        ),
        "enginehouse, critic apart, 2 processes of 1 thread": enginehouse(
            "actor.processes=1", "critic.shares=null", "cluster.threads_per_process=1"
        ),
        "TRL, 1 thread": peer("TRL", 1, *trl_script),
        "hand-written loop, 2 threads": peer("hand-written loop", 2, ours, "-m", "benchmarks.bare_ppo"),
    }
