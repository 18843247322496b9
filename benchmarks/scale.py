"""Measures the cost of a large step outside of its engines: memory of the controller, and time.

It runs `enginehouse train` with engines that only produce shapes (`shapes.py`): a rollout that answers at once with
random tokens, and an actor that looks at lengths. All time of a step except `busy/update` is therefore spent outside of
the engines. The rest is as in any run over Ray: the feed, rewards in a process, the advantage, the batch's way to the
actor, a verified update of the (tiny) weights.

- `controller_growth_mb`: largest growth of the program's own memory (without Ray's object store) in million bytes, from
  just before the first step to the end of the last, with advantage `grpo`, which reads rewards and groups.
- `controller_growth_mb_per_token_estimator`: the same with an estimator that reads the tokens' logprobs.
- `seconds_outside_engines`: median seconds of a step after the first, with `grpo`.
"""

from __future__ import annotations

import logging
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.dispatch_side import own_and_resident
from benchmarks.environments import ROOT, versions
from benchmarks.runs import execute, make_task, quickstart, read_metrics, step_seconds, with_plugin

logger = logging.getLogger(__name__)

WORK = ROOT / "benchmarks" / "out" / "scale"
SAMPLES = 8
MB = 1e6
EVERY_SIDE = (
    "actor.engine.backend=shapes",
    "rollout.engine.backend=shapes",
    "rollout.placement=separate",
    f"rollout.samples_per_prompt={SAMPLES}",
    "reward.function=benchmarks.shapes:even",
    "weights.effect_check_every=0",
    "data.validation=null",
    "environment.processes=2",
)
ESTIMATORS = {"grpo": "grpo", "per token": "surprise"}

Look = tuple[float, int]
"""A time (`time.monotonic`), and the bytes of a process's own memory."""


def measure(episodes: int = 4096, tokens: int = 8192, steps: int = 3, seed: int = 0) -> dict[str, Any]:
    """Run each estimator once.

    Args:
        episodes: episodes of a step.
        tokens: tokens of each response.
        steps: steps of a run; the first is not timed.
        seed: seed of data and samples.

    Returns:
        `metrics`, `sides` (by estimator; times of phases are those of `metrics.jsonl`), `versions`.

    Raises:
        ValueError: the episodes do not make whole groups, or there is no step to time.
        RuntimeError: a run failed; the message has the last lines that it printed.
    """
    if episodes % SAMPLES or steps < 2:
        raise ValueError(f"episodes={episodes} steps={steps}: groups have {SAMPLES}, and the first step is not timed")
    python = Path(sys.executable)
    make_task(python, WORK, seed, {"max_position_embeddings": 2 * tokens})
    sizes = (f"train.prompts_per_step={episodes // SAMPLES}", f"rollout.sampling.max_tokens={tokens}")
    sides: dict[str, dict[str, float]] = {}
    for name, estimator in ESTIMATORS.items():
        logger.info("%d episodes of %d tokens: %s", episodes, tokens, name)
        run, looks = WORK / name.replace(" ", "_"), []

        def look(pid: int, looks: list[Look] = looks) -> None:
            looks.append((time.monotonic(), own_and_resident(pid)[0]))

        command = quickstart(python, WORK, WORK / "task" / "model", run, steps, seed)
        execute(
            [*command, *EVERY_SIDE, *sizes, f"algorithm.advantage.name={estimator}"],
            run.with_suffix(".log"),
            variables=with_plugin(WORK / "site"),
            look=look,
        )
        sides[name] = row(read_metrics(run), looks)
    return {
        "metrics": {
            "controller_growth_mb": sides["grpo"]["controller_growth_mb"],
            "controller_growth_mb_per_token_estimator": sides["per token"]["controller_growth_mb"],
            "seconds_outside_engines": sides["grpo"]["seconds_outside_engines"],
        },
        "sides": sides,
        "versions": versions(python, "torch", "ray"),
    }


def row(lines: Sequence[Mapping[str, float]], looks: Sequence[Look]) -> dict[str, float]:
    """Return a run's line in the table, from its metrics and the looks at its memory."""
    outside = [seconds - line["busy/update"] for seconds, line in zip(step_seconds(lines), lines[1:], strict=True)]
    phases = ("generate", "reward", "advantage", "update", "sync")
    return {
        "controller_growth_mb": growth(lines, looks) / MB,
        "seconds_outside_engines": statistics.median(outside),
        **{f"{phase}_seconds": statistics.median(line[f"time/{phase}"] for line in lines[1:]) for phase in phases},
        "controller_cpu_seconds": statistics.median(line["cpu/controller"] for line in lines[1:]),
    }


def growth(lines: Sequence[Mapping[str, float]], looks: Sequence[Look]) -> int:
    """Return the bytes by which a process grew from before the first step to its largest size until the last ended."""
    first, last = lines[0]["clock/began"], lines[-1]["clock/ended"]
    before = [size for when, size in looks if when <= first]
    return max(size for when, size in looks if first <= when <= last) - before[-1]
