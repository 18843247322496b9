"""Measures what `train.staleness` gains: generation beside training, against one after the other.

It runs `enginehouse train` over Ray on the quickstart's task, with a wider model, so that engines and not calls decide.
The rollout has separate processes. The rollout's process and the actor's each have a core, and the system places
everything else. Generation and training take equally long, by `max_running` and the slower of the engine's two forward
passes. Every side has the same tasks and does the same work per step: the actor computes `old_logprobs` on all sides,
or, with a heavy tail, on none.

- `staleness_1_vs_0`: steps per second with even lengths. A machine with nothing else to do would give 2.
- `staleness_4_vs_1_heavy_tail`: the same if one response in k is longer than k times the shortest, by a rollout engine
  of this benchmark (`heavy_tail.py`): the `torch` engine, which is told when a response ends.
- `rollout_idle_staleness_4`: in those runs, the fraction of the time in which the rollout's process did not compute,
  because it had nothing to generate, received weights, or another program had its core.
"""

from __future__ import annotations

import logging
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.environments import ROOT, draw, plotting, versions
from benchmarks.machine import busy_cores
from benchmarks.plugin import PINNED
from benchmarks.runs import execute, make_task, quickstart, read_metrics, rotated, step_seconds, warm_up, with_plugin

logger = logging.getLogger(__name__)

WORK = ROOT / "benchmarks" / "out" / "schedules"
PICTURE = WORK.parent / "schedules.png"
CORES = "actor:1,rollout:0"
EDGE_STEPS = 5
"""Steps at both ends of a run that do not count: generation first gets ahead, and has nothing to do in the end."""
WIDER = {
    "hidden_size": 384,
    "intermediate_size": 1152,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
}
"""The quickstart's model, with 3.4 million parameters instead of 0.13, and room for long responses."""
EVERY_SIDE = (
    "rollout.placement=separate",
    "rollout.engine.options.max_running=16",
    "rollout.engine.options.fused=false",
    "actor.engine.options.lr=4e-4",
    "algorithm.old_logprobs=actor",
    "data.validation=null",
)
HEAVY_TAIL = (
    "rollout.engine.backend=heavy-tail",
    "rollout.sampling.max_tokens=256",
    "train.prompts_per_step=8",
    "actor.engine.options.tokens_per_microbatch=512",
    "reward.function=benchmarks.heavy_tail:in_order",
    "algorithm.old_logprobs=rollout",
)


@dataclass(frozen=True)
class Figures:
    """Figures of one run.

    Attributes:
        step: mean seconds of a step, from the end of one to the end of the next.
        cpu: mean seconds computed in a step, by role.
        curve: `seconds` and `rewards`, one entry per step.
    """

    step: float
    cpu: Mapping[str, float]
    curve: Mapping[str, list[float]]

    @classmethod
    def of(cls, lines: Sequence[Mapping[str, float]]) -> Figures:
        """Return the figures of a run with these metrics."""
        counted = lines[EDGE_STEPS + 1 : -EDGE_STEPS]
        roles = [name.removeprefix("cpu/") for name in lines[0] if name.startswith("cpu/")]
        ends = [line["elapsed_seconds"] for line in lines]
        return cls(
            step=statistics.mean(step_seconds(lines)[EDGE_STEPS:-EDGE_STEPS]),
            cpu={role: statistics.mean(line[f"cpu/{role}"] for line in counted) for role in roles},
            curve={
                "seconds": [end - ends[0] for end in ends],
                "rewards": [line["reward/mean"] for line in lines],
            },
        )

    @property
    def idle(self) -> float:
        """Return the fraction of the time in which the rollout did not compute, whatever it waited for."""
        return 1 - self.cpu["rollout"] / self.step


@dataclass
class Side:
    """A schedule.

    Attributes:
        overrides: overrides of the quickstart's config.
        runs: figures of one run per round.
        busy: cores that others kept busy before each run.
    """

    overrides: Sequence[str]
    runs: list[Figures] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)


def measure(rounds: int = 2, steps: int = 24, tail_steps: int = 24, seed: int = 0) -> dict[str, Any]:
    """Run every side `rounds` times in turn.

    Args:
        rounds: runs of each side; round `i` uses seed `seed + i`.
        steps: steps of a run with even lengths.
        tail_steps: steps of a run with a heavy tail.
        seed: seed of task, first weights and warm-up.

    Returns:
        `metrics`, `sides`, `versions`. A ratio is the median over rounds of each round's ratio. In addition to the
        metrics of the module: `generation_vs_training`, seconds in which generation computes divided by seconds in
        which training computes, with staleness 0; and the mean reward of the last steps by side.

    Raises:
        ValueError: there are too few steps to count any.
        RuntimeError: a run failed; the message has the last lines that it printed.
    """
    if min(steps, tail_steps) <= 2 * EDGE_STEPS + 1:
        raise ValueError(
            f"the first and last {EDGE_STEPS} steps do not count: too few are left of {steps}, {tail_steps}"
        )
    plot_python, python = plotting(), Path(sys.executable)
    make_task(python, WORK, seed, WIDER)
    start = warm_up(python, WORK, seed, "actor.engine.options.lr=1e-3")
    even = {f"staleness {k}": Side((*EVERY_SIDE, f"train.staleness={k}")) for k in (0, 1, 4)}
    tail = {f"staleness {k}, heavy tail": Side((*EVERY_SIDE, *HEAVY_TAIL, f"train.staleness={k}")) for k in (1, 4)}
    variables = {**with_plugin(WORK / "site"), PINNED: CORES}
    for number in range(rounds):
        for sides, length in ((even, steps), (tail, tail_steps)):
            for name, side in rotated(sides, number):
                logger.info("round %d of %d: %s", number + 1, rounds, name)
                run = WORK / f"{name}, round {number}".replace(", ", "-").replace(" ", "_")
                command = quickstart(python, WORK, start, run, length, seed + number)
                side.busy.append(busy_cores())
                execute([*command, *side.overrides], run.with_suffix(".log"), variables=variables)
                side.runs.append(Figures.of(read_metrics(run)))
    curves = {name: [run.curve for run in side.runs] for name, side in even.items()}
    draw(plot_python, "benchmarks.schedules_plot", curves=curves, path=str(PICTURE))
    return {
        "metrics": compare(even, tail),
        "sides": {name: row(side) for name, side in {**even, **tail}.items()},
        "picture": str(PICTURE.relative_to(ROOT)),
        "versions": versions(python, "torch", "transformers", "ray"),
    }


def compare(even: Mapping[str, Side], tail: Mapping[str, Side]) -> dict[str, float]:
    """Return the figures to keep."""
    zero, one = even["staleness 0"].runs, even["staleness 1"].runs
    tail_one, tail_four = (tail[f"staleness {k}, heavy tail"].runs for k in (1, 4))
    return {
        "staleness_1_vs_0": quicker(one, zero),
        "staleness_4_vs_1_heavy_tail": quicker(tail_four, tail_one),
        "rollout_idle_staleness_4": statistics.median(run.idle for run in tail_four),
        "generation_vs_training": statistics.median(run.cpu["rollout"] / run.cpu["actor"] for run in zero),
        **{f"final_reward/{name.replace(' ', '_')}": final_reward(side.runs) for name, side in even.items()},
    }


def quicker(runs: Sequence[Figures], than: Sequence[Figures]) -> float:
    """Return the ratio of steps per second, the median over rounds."""
    return statistics.median(theirs.step / ours.step for ours, theirs in zip(runs, than, strict=True))


def final_reward(runs: Sequence[Figures]) -> float:
    """Return the mean reward of the last steps' samples."""
    return statistics.median(statistics.mean(run.curve["rewards"][-EDGE_STEPS:]) for run in runs)


def row(side: Side) -> dict[str, float | int]:
    """Return a side's line in the table."""

    def median(values: Sequence[float]) -> float:
        return statistics.median(values)

    runs = side.runs
    return {
        "ms_a_step": 1000 * median([run.step for run in runs]),
        "fastest_round": 1000 * min(run.step for run in runs),
        "slowest_round": 1000 * max(run.step for run in runs),
        "rollout_idle": median([run.idle for run in runs]),
        **{f"{role}_ms": 1000 * median([run.cpu[role] for run in runs]) for role in runs[0].cpu},
        "final_reward": final_reward(runs),
        "cores_busy_before": max(side.busy),
    }
