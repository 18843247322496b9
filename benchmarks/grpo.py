"""GRPO end to end: enginehouse, controller and Ray included, against TRL's `GRPOTrainer`, on the quickstart.

The same model, warmed up once, task, prompts a step, group size, new tokens and optimizer steps; each program in a
Python environment of its own, with the same torch, in the ways of using two cores that are worth trying: the best one
counts. The sides take turns, and their models are judged by one sampler on the held-out prompts. A hand-written loop
stands beside them as the floor. `size=medium` is a size where engines and not calls decide (`benchmarks.words_task`).
"""

from __future__ import annotations

import json
import logging
import shutil
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
class Size:
    """What a run is of.

    Attributes:
        prompts: prompts of a step, with 8 samples each.
        new_tokens: most tokens of a response.
        reward: `FILE:FUNCTION`.
        overrides: of the quickstart's config, where it is for another size.
        untimed: first steps of a run that are not timed.
        steps: optimizer steps of a run, unless told otherwise.
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


AHEAD = "enginehouse staleness 1"
"""A program of its own: its samples are older, so it is not compared as ours."""


@dataclass(frozen=True)
class Outcome:
    """What one run of a side gave.

    Attributes:
        step_seconds: from the end of each step to the end of the next: nothing that a step costs is left out.
        model: directory of the trained model.
        engine_seconds: of every step, spent in the engines; None where the side cannot say.
        generate_seconds: of every step, spent generating; None where the side cannot say.
        untimed: first steps that are not timed.
    """

    step_seconds: Sequence[float]
    model: Path
    engine_seconds: Sequence[float] | None = None
    generate_seconds: Sequence[float] | None = None
    untimed: int = WARM_UP_STEPS

    def timed(self, seconds: Sequence[float]) -> Sequence[float]:
        """Those of the steps that count: the last one, which includes what ends a run, is left out."""
        return seconds[self.untimed : -1]


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
        """Each round's median step."""
        return [statistics.median(outcome.timed(outcome.step_seconds)) for outcome in self.outcomes]

    def mean_step_seconds(self) -> list[float]:
        """The same, as means: what is done only in some steps counts here."""
        return [statistics.mean(outcome.timed(outcome.step_seconds)) for outcome in self.outcomes]


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
        steps: optimizer steps of a run; 0: as many as the size has.
        seed: seed of task, first weights and warm-up.
        own_environment: make a Python environment for enginehouse; otherwise the running one is used.
        generate: also run `benchmarks.generate`.
        size: `"small"`, the quickstart, or `"medium"`.

    Returns:
        `metrics`, `sides`, `versions`. Metrics: `steps_per_second_vs_trl`, `generate_vs_transformers`,
        `controller_share` (share of our step spent in neither engine), `steps_per_second_vs_trl_staleness_1` (with
        generation beside training), and steps a second and final reward by program.
        Of `size="medium"` there is no reward to judge, and instead of `generate_vs_transformers` there is
        `generation_vs_products`: our generation's seconds by those of its matrix products alone on two threads.

    Raises:
        ValueError: an unknown size, or too few steps to time any.
        RuntimeError: a side failed; with what it printed last.
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
    ours = Path(sys.executable)
    if own_environment:
        folders = ("core", "plugins/torch")
        installed = [word for folder in folders for word in ("-e", folder)]
        manifests = [ROOT / folder / "pyproject.toml" for folder in folders]
        ours = environment("enginehouse", ["torch"], installed, keyed_by=manifests)
    start = prepare(ours, WORK, seed) if small else prepare_words(seed)
    sides = build_sides(ours, trl, start, steps, of)
    for number in range(rounds):
        for name, side in rotated(sides, number):
            directory = WORK / f"{name}, round {number}".replace(", ", "-").replace(" ", "_")
            side.busy.append(busy_cores())
            logger.info("round %d of %d: %s", number + 1, rounds, name)
            execute(side.command(directory, seed + number), directory.with_suffix(".log"), side.threads)
            side.outcomes.append(replace(side.read(directory), untimed=of.untimed))
    rewards: dict[str, list[float]] = {}
    if small:
        rewards = {name: [final_reward(outcome.model) for outcome in side.outcomes] for name, side in sides.items()}
    metrics = compare(sides, rewards)
    if not small:
        metrics["generation_vs_products"] = generation_vs_products(sides, of, start)
    elif generate:
        metrics["generate_vs_transformers"] = generation_ratio()
    return {
        "name": "grpo" if small else f"grpo_{size}",
        "metrics": metrics,
        "sides": {name: row(side, rewards.get(name, ())) for name, side in sides.items()},
        "reward_before": final_reward(start) if small else None,
        "versions": {
            "enginehouse": versions(ours, "torch", "transformers", "ray"),
            "trl": versions(trl, "torch", "transformers", "trl", "accelerate"),
        },
    }


def prepare_words(seed: int) -> Path:
    """Make the medium size's task; returns the model's directory."""
    from benchmarks.words_task import make

    shutil.rmtree(WORK, ignore_errors=True)
    return make(WORK / "task", seed)


def build_sides(ours: Path, trl: Path, start: Path, steps: int, size: Size = SIZES["small"]) -> dict[str, Side]:
    """The sides, by name, in the order of the first round."""
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
        "hand-written loop, 2 threads": peer("hand-written loop", 2, *bare_script, read=read_step_seconds),
    }


def read_enginehouse(run: Path) -> Outcome:
    """Read a run directory of `enginehouse train`."""
    lines = read_metrics(run)
    return Outcome(
        step_seconds=step_seconds(lines),
        engine_seconds=[sum(value for key, value in line.items() if key.startswith("busy/")) for line in lines[1:]],
        generate_seconds=[line["busy/generate"] for line in lines[1:]],
        model=run / "model",
    )


def read_step_seconds(directory: Path) -> Outcome:
    """Read what `trl_grpo.py` and `bare_grpo.py` save."""
    return Outcome(json.loads((directory / "step_seconds.json").read_text()), directory)


def final_reward(model: Path, task: Path = WORK / "task", greedy: bool = False) -> float:
    """Mean reward of sampled (or greedy) answers to the held-out prompts of a task, by one sampler for all sides."""
    from benchmarks.bare_grpo import Task, load, validate

    loaded, tokenizer = load(model)
    return validate(loaded, Task.load(task, tokenizer), greedy, samples=1 if greedy else 4)


def generation_ratio() -> float:
    """CPU seconds of `transformers.generate` by those of the rollout engine, on one batch."""
    from benchmarks.generate import measure as measure_generate

    return measure_generate()["metrics"]["generate_vs_transformers"]


def generation_vs_products(sides: Mapping[str, Side], size: Size, model: Path) -> float:
    """Seconds of our generation by those of its matrix products, of whichever side of ours generates fastest."""
    from benchmarks.words_task import product_seconds

    outcomes = [outcome for side in sides.values() if side.program == "enginehouse" for outcome in side.outcomes]
    ours = min(statistics.median(outcome.timed(outcome.generate_seconds or ())) for outcome in outcomes)
    return ours / product_seconds(8 * size.prompts, size.new_tokens, model)


def row(side: Side, rewards: Sequence[float]) -> dict[str, float | int]:
    """A side's line in the table; without rewards there is none in it."""
    seconds = side.step_seconds()
    return {
        "ms_a_step": 1000 * statistics.median(seconds),
        "fastest_round": 1000 * min(seconds),
        "slowest_round": 1000 * max(seconds),
        "mean_ms": 1000 * statistics.median(side.mean_step_seconds()),
        **({"final_reward": statistics.median(rewards)} if rewards else {}),
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
    if AHEAD in best:
        metrics["steps_per_second_vs_trl_staleness_1"] = seconds["TRL"] / seconds[AHEAD]
    for program, name in best.items():
        key = program.lower().replace(" ", "_").replace("-", "_")
        metrics[f"steps_per_second/{key}"] = 1 / seconds[program]
        if name in rewards:
            metrics[f"final_reward/{key}"] = statistics.median(rewards[name])
    return metrics


def controller_share(outcomes: Sequence[Outcome]) -> float:
    """Share of the timed steps that was spent in neither engine."""
    steps = sum(sum(outcome.timed(outcome.step_seconds)) for outcome in outcomes)
    engines = sum(sum(outcome.timed(outcome.engine_seconds or ())) for outcome in outcomes)
    return 1 - engines / steps
