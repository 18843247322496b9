"""The sides of a benchmark of whole training runs: how each is run, a run's outcome, and the figures made of outcomes.

Sides take turns. A program may have several sides, for different ways of using the machine; the fastest counts.
"""

from __future__ import annotations

import json
import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.machine import busy_cores
from benchmarks.runs import execute, read_metrics, rotated, step_seconds

logger = logging.getLogger(__name__)

WARM_UP_STEPS = 20
"""First steps of a run that are not timed."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of one run of a side.

    Attributes:
        step_seconds: seconds from the end of each step to the end of the next, which leave nothing out.
        model: directory of the trained model.
        engine_seconds: seconds of every step spent in the engines; None if the side cannot say.
        generate_seconds: seconds of every step spent generating; None if the side cannot say.
        untimed: number of first steps that are not timed.
    """

    step_seconds: Sequence[float]
    model: Path
    engine_seconds: Sequence[float] | None = None
    generate_seconds: Sequence[float] | None = None
    untimed: int = WARM_UP_STEPS

    def timed(self, seconds: Sequence[float]) -> Sequence[float]:
        """Return the seconds of the steps that count, without the last, which includes the end of the run."""
        return seconds[self.untimed : -1]


@dataclass
class Side:
    """One way of running one of the programs.

    Attributes:
        program: program of the side; the best side of a program counts.
        command: function that returns the command line for an output directory and a seed.
        read: function that reads the outcome from the output directory.
        threads: value of `OMP_NUM_THREADS`; None: the program decides.
        outcomes: one outcome per round.
        busy: cores that others kept busy before each round.
    """

    program: str
    command: Callable[[Path, int], Sequence[object]]
    read: Callable[[Path], Outcome]
    threads: int | None = None
    outcomes: list[Outcome] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)

    def step_seconds(self) -> list[float]:
        """Return each round's median seconds of a step."""
        return [statistics.median(outcome.timed(outcome.step_seconds)) for outcome in self.outcomes]

    def mean_step_seconds(self) -> list[float]:
        """Return each round's mean seconds of a step, which count work that only some steps do."""
        return [statistics.mean(outcome.timed(outcome.step_seconds)) for outcome in self.outcomes]


def run_in_turn(sides: Mapping[str, Side], work: Path, rounds: int, seed: int, untimed: int = WARM_UP_STEPS) -> None:
    """Run every side once a round, with `seed` plus the round's number, and store the outcomes in the sides.

    Args:
        sides: sides by name.
        work: directory for what runs write.
        rounds: number of rounds.
        seed: seed of the first round.
        untimed: number of first steps of a run that are not timed.
    """
    for number in range(rounds):
        for name, side in rotated(sides, number):
            directory = work / f"{name}, round {number}".replace(", ", "-").replace(" ", "_")
            side.busy.append(busy_cores())
            logger.info("round %d of %d: %s", number + 1, rounds, name)
            execute(side.command(directory, seed + number), directory.with_suffix(".log"), side.threads)
            side.outcomes.append(replace(side.read(directory), untimed=untimed))


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
    """Read what `trl_grpo.py` and the other scripts save."""
    return Outcome(json.loads((directory / "step_seconds.json").read_text()), directory)


def final_reward(model: Path, task: Path, greedy: bool = False) -> float:
    """Return the mean reward of sampled (or greedy) answers to held-out prompts, by one sampler for all sides."""
    from benchmarks.bare_grpo import Task, load, validate

    loaded, tokenizer = load(model)
    return validate(loaded, Task.load(task, tokenizer), greedy, samples=1 if greedy else 4)


def final_rewards(sides: Mapping[str, Side], task: Path) -> dict[str, list[float]]:
    """Return the `final_reward` of each side's rounds."""
    return {name: [final_reward(outcome.model, task) for outcome in side.outcomes] for name, side in sides.items()}


def row(side: Side, rewards: Sequence[float]) -> dict[str, float | int]:
    """Return a side's line in the table; without rewards the line has none."""
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


def fastest(sides: Mapping[str, Side]) -> dict[str, str]:
    """Return each program's fastest side, by its median round."""
    best: dict[str, str] = {}
    for program in dict.fromkeys(side.program for side in sides.values()):
        candidates = [name for name, side in sides.items() if side.program == program]
        best[program] = min(candidates, key=lambda name: statistics.median(sides[name].step_seconds()))
    return best


def compare(
    sides: Mapping[str, Side], rewards: Mapping[str, Sequence[float]], ratios: Mapping[str, tuple[str, str]]
) -> dict[str, float]:
    """Return the figures to keep: each program by its fastest side.

    Args:
        sides: sides by name, with at least one of enginehouse.
        rewards: final rewards of the sides' rounds; the figures have none for a side that is not in it.
        ratios: by the name of a figure, two programs: steps per second of the first divided by those of the second.
    """
    best = fastest(sides)
    seconds = {program: statistics.median(sides[name].step_seconds()) for program, name in best.items()}
    metrics = {name: seconds[slow] / seconds[fast] for name, (fast, slow) in ratios.items()}
    metrics["controller_share"] = controller_share(sides[best["enginehouse"]].outcomes)
    for program, name in best.items():
        key = program.lower().replace(" ", "_").replace("-", "_")
        metrics[f"steps_per_second/{key}"] = 1 / seconds[program]
        if name in rewards:
            metrics[f"final_reward/{key}"] = statistics.median(rewards[name])
    return metrics


def controller_share(outcomes: Sequence[Outcome]) -> float:
    """Return the fraction of the timed steps that was spent in neither engine."""
    steps = sum(sum(outcome.timed(outcome.step_seconds)) for outcome in outcomes)
    engines = sum(sum(outcome.timed(outcome.engine_seconds or ())) for outcome in outcomes)
    return 1 - engines / steps
