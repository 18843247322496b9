"""GRPO end to end: enginehouse, controller and Ray included, against TRL's `GRPOTrainer`, on the quickstart.

The same model, warmed up once, task, prompts a step, group size, new tokens and optimizer steps; each program in a
Python environment of its own, with the same torch, in the ways of using two cores that are worth trying: the best one
counts. The sides take turns, and their models are judged by one sampler on the held-out prompts. A hand-written loop
stands beside them as the floor.
"""

from __future__ import annotations

import json
import logging
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.environments import ROOT, environment, versions
from benchmarks.machine import busy_cores
from benchmarks.runs import QUICKSTART, execute, prepare, quickstart, read_metrics, rotated, step_seconds

logger = logging.getLogger(__name__)

WORK = ROOT / "benchmarks" / "out" / "grpo"
WARM_UP_STEPS = 20
"""First steps of a run that are not timed."""


@dataclass(frozen=True)
class Outcome:
    """What one run of a side gave.

    Attributes:
        step_seconds: from the end of each step to the end of the next: nothing that a step costs is left out.
        model: directory of the trained model.
        engine_seconds: of every step, spent in the engines; None where the side cannot say.
    """

    step_seconds: Sequence[float]
    model: Path
    engine_seconds: Sequence[float] | None = None


@dataclass
class Side:
    """One way of running one of the programs.

    Attributes:
        program: whose side it is; the best side of a program counts.
        command: the command line, from an output directory and a seed.
        read: the outcome, from the output directory.
        threads: value of `OMP_NUM_THREADS`; None: the program decides.
        outcomes: one a round.
        busy: cores that others kept busy before each round.
    """

    program: str
    command: Callable[[Path, int], Sequence[object]]
    read: Callable[[Path], Outcome]
    threads: int | None = None
    outcomes: list[Outcome] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)

    def step_seconds(self) -> list[float]:
        """Each round's median step after the first ones; the last step, which includes what ends a run, is left out."""
        return [statistics.median(outcome.step_seconds[WARM_UP_STEPS:-1]) for outcome in self.outcomes]

    def mean_step_seconds(self) -> list[float]:
        """The same, as means: what is done only in some steps counts here."""
        return [statistics.mean(outcome.step_seconds[WARM_UP_STEPS:-1]) for outcome in self.outcomes]


def measure(
    rounds: int = 3, steps: int = 250, seed: int = 0, own_environment: bool = True, generate: bool = True
) -> dict[str, Any]:
    """Run every side `rounds` times in turn.

    Args:
        rounds: runs of each side; round `i` uses seed `seed + i`.
        steps: optimizer steps of a run.
        seed: seed of task, first weights and warm-up.
        own_environment: make a Python environment for enginehouse; otherwise the running one is used.
        generate: also run `benchmarks.generate`.

    Returns:
        `metrics`, `sides`, `versions`. Metrics: `steps_per_second_vs_trl`, `generate_vs_transformers`,
        `controller_share` (share of our step spent in neither engine), and steps a second and final reward by program.

    Raises:
        ValueError: too few steps to time any.
        RuntimeError: a side failed; with what it printed last.
    """
    if steps < 2 * WARM_UP_STEPS:
        raise ValueError(
            f"steps={steps}: the first {WARM_UP_STEPS} steps are not timed; at least twice as many are needed"
        )
    trl = environment("trl", ["torch"], ["trl==1.16.*"])
    ours = Path(sys.executable)
    if own_environment:
        folders = ("core", "plugins/torch")
        installed = [word for folder in folders for word in ("-e", folder)]
        manifests = [ROOT / folder / "pyproject.toml" for folder in folders]
        ours = environment("enginehouse", ["torch"], installed, keyed_by=manifests)
    start = prepare(ours, WORK, seed)
    sides = build_sides(ours, trl, start, steps)
    for number in range(rounds):
        for name, side in rotated(sides, number):
            directory = WORK / f"{name}, round {number}".replace(", ", "-").replace(" ", "_")
            side.busy.append(busy_cores())
            logger.info("round %d of %d: %s", number + 1, rounds, name)
            execute(side.command(directory, seed + number), directory.with_suffix(".log"), side.threads)
            side.outcomes.append(side.read(directory))
    rewards = {name: [final_reward(outcome.model) for outcome in side.outcomes] for name, side in sides.items()}
    metrics = compare(sides, rewards)
    if generate:
        metrics["generate_vs_transformers"] = generation_ratio()
    return {
        "metrics": metrics,
        "sides": {name: row(side, rewards[name]) for name, side in sides.items()},
        "reward_before": final_reward(start),
        "versions": {
            "enginehouse": versions(ours, "torch", "transformers", "ray"),
            "trl": versions(trl, "torch", "transformers", "trl", "accelerate"),
        },
    }


def build_sides(ours: Path, trl: Path, start: Path, steps: int) -> dict[str, Side]:
    """The sides, by name, in the order of the first round."""
    task = WORK / "task"

    def enginehouse(*overrides: str) -> Side:
        def command(directory: Path, seed: int) -> Sequence[object]:
            return [*quickstart(ours, WORK, start, directory, steps, seed), *overrides]

        return Side("enginehouse", command, read_enginehouse)

    def peer(program: str, threads: int, *script: object, read: Callable[[Path], Outcome]) -> Side:
        def command(directory: Path, seed: int) -> Sequence[object]:
            shared = ["--task", task, "--model", start, "--steps", steps, "--seed", seed, "--threads", threads]
            return [*script, *shared, "--save", directory]

        return Side(program, command, read, threads)

    trl_script = (trl, "benchmarks/trl_grpo.py", "--reward", QUICKSTART / "reward.py")
    bare_script = (ours, "-m", "benchmarks.bare_grpo")
    return {
        "enginehouse, 1 process of 2 threads": enginehouse("actor.processes=1", "cluster.threads_per_process=2"),
        "TRL, 2 threads": peer("TRL", 2, *trl_script, read=read_step_seconds),
        "enginehouse, 2 processes of 1 thread": enginehouse(
            "actor.processes=2", "rollout.replicas=2", "cluster.threads_per_process=1"
        ),
        "TRL, 1 thread": peer("TRL", 1, *trl_script, read=read_step_seconds),
        "hand-written loop, 2 threads": peer("hand-written loop", 2, *bare_script, read=read_step_seconds),
    }


def read_enginehouse(run: Path) -> Outcome:
    """Read a run directory of `enginehouse train`."""
    lines = read_metrics(run)
    return Outcome(
        step_seconds=step_seconds(lines),
        engine_seconds=[sum(value for key, value in line.items() if key.startswith("busy/")) for line in lines[1:]],
        model=run / "model",
    )


def read_step_seconds(directory: Path) -> Outcome:
    """Read what `trl_grpo.py` and `bare_grpo.py` save."""
    return Outcome(json.loads((directory / "step_seconds.json").read_text()), directory)


def final_reward(model: Path) -> float:
    """Mean reward of sampled answers to the held-out prompts, by one sampler for all sides."""
    from benchmarks.bare_grpo import Task, load, validate

    loaded, tokenizer = load(model)
    return validate(loaded, Task.load(WORK / "task", tokenizer))


def generation_ratio() -> float:
    """CPU seconds of `transformers.generate` by those of the rollout engine, on one batch."""
    from benchmarks.generate import measure as measure_generate

    return measure_generate()["metrics"]["generate_vs_transformers"]


def row(side: Side, rewards: Sequence[float]) -> dict[str, float | int]:
    """A side's line in the table."""
    seconds = side.step_seconds()
    return {
        "ms_a_step": 1000 * statistics.median(seconds),
        "fastest_round": 1000 * min(seconds),
        "slowest_round": 1000 * max(seconds),
        "mean_ms": 1000 * statistics.median(side.mean_step_seconds()),
        "final_reward": statistics.median(rewards),
        "rounds": len(seconds),
        "cores_busy_before": max(side.busy),
    }


def compare(sides: Mapping[str, Side], rewards: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The figures to keep: each program by its best side."""
    best: dict[str, str] = {}
    for program in dict.fromkeys(side.program for side in sides.values()):
        candidates = [name for name, side in sides.items() if side.program == program]
        best[program] = min(candidates, key=lambda name: statistics.median(sides[name].step_seconds()))
    seconds = {program: statistics.median(sides[name].step_seconds()) for program, name in best.items()}
    metrics = {
        "steps_per_second_vs_trl": seconds["TRL"] / seconds["enginehouse"],
        "controller_share": controller_share(sides[best["enginehouse"]].outcomes),
    }
    for program, name in best.items():
        key = program.lower().replace(" ", "_").replace("-", "_")
        metrics[f"steps_per_second/{key}"] = 1 / seconds[program]
        metrics[f"final_reward/{key}"] = statistics.median(rewards[name])
    return metrics


def controller_share(outcomes: Sequence[Outcome]) -> float:
    """Share of the timed steps that was spent in neither engine."""
    steps = sum(sum(outcome.step_seconds[WARM_UP_STEPS:-1]) for outcome in outcomes)
    engines = sum(sum((outcome.engine_seconds or ())[WARM_UP_STEPS:-1]) for outcome in outcomes)
    return 1 - engines / steps
