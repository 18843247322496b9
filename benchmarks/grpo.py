"""GRPO end to end: enginehouse, controller and Ray included, against TRL's `GRPOTrainer`, on the quickstart.

All sides have the same model, warmed up once, and the same task, prompts per step, group size, new tokens and optimizer
steps. Each program runs in a separate Python environment with the same torch, and in each way of using two cores that
is worth trying; its best way counts. The sides take turns, and one sampler judges their models on the held-out prompts.
A hand-written loop is the floor. At `size=medium` the engines decide and not the calls (`benchmarks.words_task`).
"""

from __future__ import annotations

import shutil
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.environments import ROOT, checkout, environment, versions
from benchmarks.runs import QUICKSTART, prepare, quickstart
from benchmarks.sides import (
    WARM_UP_STEPS,
    Outcome,
    Side,
    compare,
    final_reward,
    final_rewards,
    read_enginehouse,
    read_step_seconds,
    row,
    run_in_turn,
)

WORK = ROOT / "benchmarks" / "out" / "grpo"


@dataclass(frozen=True)
class Size:
    """The size of a run.

    Attributes:
        prompts: prompts per step, with 8 samples each.
        new_tokens: maximum tokens of a response.
        reward: reward function, `FILE:FUNCTION`.
        overrides: overrides of the quickstart's config for this size.
        untimed: number of first steps that are not timed.
        steps: optimizer steps of a run, unless given.
    """

    prompts: int
    new_tokens: int
    reward: str
    overrides: Sequence[str]
    untimed: int
    steps: int


SIZES = {
    "small": Size(32, 7, f"{QUICKSTART / 'reward.py'}:sorted_digits", (), WARM_UP_STEPS, 250),
    "medium": Size(
        prompts=8,
        new_tokens=128,
        reward="benchmarks/words_task.py:even_words",
        overrides=(
            "reward.function=benchmarks.words_task:even_words",
            "data.validation=null",
            "train.prompts_per_step=8",
            "rollout.sampling.max_tokens=128",
        ),
        untimed=2,
        steps=9,
    ),
}


LOOP = "hand-written loop"
AHEAD = "enginehouse staleness 1"
"""A separate program: its samples are older, so it does not stand for enginehouse in the comparison."""


def measure(
    rounds: int = 3,
    steps: int = 0,
    seed: int = 0,
    own_environment: bool = True,
    generate: bool = True,
    size: str = "small",
) -> dict[str, Any]:
    """Run every side `rounds` times in turn.

    Args:
        rounds: runs of each side; round `i` uses seed `seed + i`.
        steps: optimizer steps of a run; 0: the size's own number.
        seed: seed of task, first weights and warm-up.
        own_environment: True to make a Python environment for enginehouse; otherwise the running one is used.
        generate: True to run `benchmarks.generate` too.
        size: `"small"`, the quickstart, or `"medium"`.

    Returns:
        `metrics`, `sides`, `versions`. Metrics: `steps_per_second_vs_trl`, `generate_vs_transformers`,
        `controller_share` (fraction of our step spent in neither engine), `step_vs_handwritten` (seconds of our step
        divided by seconds of the loop's step), `steps_per_second_vs_trl_staleness_1` (with generation beside training),
        and steps per second and final reward by program. `size="medium"` has no reward to judge. Instead of
        `generate_vs_transformers` it has `generation_vs_products`: seconds of our generation divided by seconds of its
        matrix products on two threads.

    Raises:
        ValueError: the size is unknown, or there are too few steps to time any.
        RuntimeError: a side failed; the message has the last lines that it printed.
    """
    if size not in SIZES:
        raise ValueError(f"size={size}: one of {', '.join(SIZES)}")
    of, small = SIZES[size], size == "small"
    steps = steps or of.steps
    if steps < 2 * of.untimed:
        raise ValueError(
            f"steps={steps}: the first {of.untimed} steps are not timed; at least twice as many are needed"
        )
    trl = environment("trl", ["torch"], ["trl==1.16.*"])
    ours = checkout() if own_environment else Path(sys.executable)
    start = prepare(ours, WORK, seed) if small else prepare_words(seed)
    sides = build_sides(ours, trl, start, steps, of)
    run_in_turn(sides, WORK, rounds, seed, of.untimed)
    rewards = final_rewards(sides, WORK / "task") if small else {}
    metrics = figures(sides, rewards)
    if not small:
        metrics["generation_vs_products"] = generation_vs_products(sides, of, start)
    elif generate:
        metrics["generate_vs_transformers"] = generation_ratio()
    return {
        "name": "grpo" if small else f"grpo_{size}",
        "metrics": metrics,
        "sides": {name: row(side, rewards.get(name, ())) for name, side in sides.items()},
        "reward_before": final_reward(start, WORK / "task") if small else None,
        "versions": {
            "enginehouse": versions(ours, "torch", "transformers", "ray"),
            "trl": versions(trl, "torch", "transformers", "trl", "accelerate"),
        },
    }


def prepare_words(seed: int) -> Path:
    """Make the medium size's task; return the model's directory."""
    from benchmarks.words_task import make

    shutil.rmtree(WORK, ignore_errors=True)
    return make(WORK / "task", seed)


def build_sides(ours: Path, trl: Path, start: Path, steps: int, size: Size = SIZES["small"]) -> dict[str, Side]:
    """Return the sides by name, in the order of the first round."""
    task = WORK / "task"

    def enginehouse(*overrides: str, program: str = "enginehouse") -> Side:
        def command(directory: Path, seed: int) -> Sequence[object]:
            return [*quickstart(ours, WORK, start, directory, steps, seed), *size.overrides, *overrides]

        return Side(program, command, read_enginehouse)

    def peer(program: str, threads: int, *script: object, read: Callable[[Path], Outcome]) -> Side:
        def command(directory: Path, seed: int) -> Sequence[object]:
            shared = ["--task", task, "--model", start, "--steps", steps, "--seed", seed, "--threads", threads]
            sizes = ["--prompts", size.prompts, "--new-tokens", size.new_tokens]
            return [*script, *shared, *sizes, "--save", directory]

        return Side(program, command, read, threads)

    trl_script = (trl, "benchmarks/trl_grpo.py", "--reward", size.reward)
    bare_script = (ours, "-m", "benchmarks.bare_grpo")
    ahead = enginehouse("train.staleness=1", "rollout.placement=separate", program=AHEAD)
    return {
        **({"enginehouse, staleness 1, rollout apart": ahead} if size is SIZES["small"] else {}),
        "enginehouse, 1 process of 2 threads": enginehouse("actor.processes=1", "cluster.threads_per_process=2"),
        "TRL, 2 threads": peer("TRL", 2, *trl_script, read=read_step_seconds),
        "enginehouse, 2 processes of 1 thread": enginehouse(
            "actor.processes=2", "rollout.replicas=2", "cluster.threads_per_process=1"
        ),
        "TRL, 1 thread": peer("TRL", 1, *trl_script, read=read_step_seconds),
        "hand-written loop, 2 threads": peer(LOOP, 2, *bare_script, read=read_step_seconds),
    }


def generation_ratio() -> float:
    """Return the CPU seconds of `transformers.generate` divided by those of the rollout engine, on one batch."""
    from benchmarks.generate import measure as measure_generate

    return measure_generate()["metrics"]["generate_vs_transformers"]


def generation_vs_products(sides: Mapping[str, Side], size: Size, model: Path) -> float:
    """Return the seconds of generation on our fastest side, divided by the seconds of its matrix products."""
    from benchmarks.words_task import product_seconds

    outcomes = [outcome for side in sides.values() if side.program == "enginehouse" for outcome in side.outcomes]
    ours = min(statistics.median(outcome.timed(outcome.generate_seconds or ())) for outcome in outcomes)
    return ours / product_seconds(8 * size.prompts, size.new_tokens, model)


def figures(sides: Mapping[str, Side], rewards: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the figures to keep of runs of these sides."""
    ratios = {"steps_per_second_vs_trl": ("enginehouse", "TRL")}
    if any(side.program == AHEAD for side in sides.values()):
        ratios["steps_per_second_vs_trl_staleness_1"] = (AHEAD, "TRL")
    if any(side.program == LOOP for side in sides.values()):
        ratios["step_vs_handwritten"] = (LOOP, "enginehouse")
    return compare(sides, rewards, ratios)
