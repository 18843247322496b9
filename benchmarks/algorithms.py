"""Runs every recipe of `enginehouse recipes list` from nothing to a trained model, and draws its curve over some seeds.

All recipes of a task begin from the same warmed-up model; runs differ in samples and in the order of data. One sampler
judges policies on the held-out prompts (`reward/NAME`). Policies of games are judged by their last validation, a reward
model by held-out pairs (`accuracy/rm`). Two runs share the machine, each in one process of one thread, so
`seconds/NAME` is from a busy machine. It does not include making the model from which a run begins.
"""

from __future__ import annotations

import json
import logging
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.environments import ROOT, draw, plotting, versions
from benchmarks.runs import execute, read_metrics
from benchmarks.sides import final_reward
from enginehouse_recipes import DIRECTORY, recipes
from enginehouse_rl.config.earlier_run import read_record

logger = logging.getLogger(__name__)

WORK = ROOT / "benchmarks" / "out" / "algorithms"
TASK_MADE = WORK / DIRECTORY / "task"
PICTURE = WORK.parent / "algorithms.png"
WARM_UP, OF_GAMES = "sft", "sft_chat"
"""Recipes whose models the other recipes begin from. The results do not show them."""
VALIDATE_EVERY = 10
AS_IN_TRAINING = ("evaluation.sampling.temperature=1", "evaluation.max_prompts=256")
"""Overrides with which a validation samples answers as training does."""
SHOWN = {
    "validation/reward": "reward, held-out prompts",
    "validation/accuracy": "accuracy, held-out pairs",
}
"""Names, in the picture, of the validation figures that are drawn."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of one run.

    Attributes:
        seconds: time from the first step to the end of the last.
        steps: steps after which there was a validation.
        values: results of these validations; the first is of the model before the first step.
        final: reward or accuracy of the trained model.
        greedy: reward of the trained model's greedy answers; None if it gives no answers.
    """

    seconds: float
    steps: Sequence[int]
    values: Sequence[float]
    final: float
    greedy: float | None = None


def measure(seeds: int = 3, names: str = "", at_once: int = 2, keep: bool = False) -> dict[str, Any]:
    """Run every recipe with each seed.

    Args:
        seeds: number of runs of each recipe, with the seeds 0, 1, ...
        names: names of the recipes, separated by commas; empty: all.
        at_once: number of runs at the same time.
        keep: True to keep what an earlier call has finished, and run only the rest.

    Returns:
        `metrics`, `sides`, `picture`, `versions`. Metrics, means over seeds: `reward/NAME` (`accuracy/NAME` for rm),
        `seconds/NAME`, and `reward/sft`, of the model from which the sorting recipes begin.

    Raises:
        RuntimeError: a run failed; the message has the last lines that it printed.
    """
    chosen = names.split(",") if names else [name for name in recipes() if name not in (WARM_UP, OF_GAMES)]
    plot_python, python = plotting(), Path(sys.executable)
    if not keep:
        shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True, exist_ok=True)
    for name in chosen:
        _enginehouse(python, f"prepare-{name}", "prepare", name)
    jobs = [(name, seed) for seed in range(seeds) for name in chosen]
    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(lambda job: _run(python, *job), jobs))
    runs = {name: [_outcome(name, WORK / _directory(name, seed)) for seed in range(seeds)] for name in chosen}
    curves = {
        name: {"steps": list(of[0].steps), "runs": [list(one.values) for one in of], "figure": SHOWN[_figure(name)]}
        for name, of in runs.items()
    }
    draw(plot_python, "benchmarks.algorithms_plot", curves=curves, path=str(PICTURE))
    warmed_up = WORK / DIRECTORY / WARM_UP
    begun = {f"reward/{WARM_UP}": final_reward(warmed_up / "model", TASK_MADE)} if warmed_up.exists() else {}
    return {
        "metrics": figures(runs) | begun,
        "sides": {name: row(of) for name, of in runs.items()},
        "picture": str(PICTURE.relative_to(ROOT)),
        "versions": versions(python, "torch", "transformers"),
    }


def figures(runs: Mapping[str, Sequence[Outcome]]) -> dict[str, float]:
    """Return the figures to keep: means over seeds."""
    final = {f"{_what(name)}/{name}": statistics.mean(one.final for one in of) for name, of in runs.items()}
    return final | {f"seconds/{name}": statistics.mean(one.seconds for one in of) for name, of in runs.items()}


def row(runs: Sequence[Outcome]) -> dict[str, float | int]:
    """Return a recipe's line in the table."""
    final = [one.final for one in runs]
    greedy = [one.greedy for one in runs if one.greedy is not None]
    return {
        "steps": runs[0].steps[-1],
        "before": statistics.mean(one.values[0] for one in runs),
        "final": statistics.mean(final),
        "lowest": min(final),
        "highest": max(final),
        **({"greedy": statistics.mean(greedy)} if greedy else {}),
        "seconds": statistics.mean(one.seconds for one in runs),
        "seeds": len(runs),
    }


def curve(lines: Sequence[Mapping[str, Any]], figure: str) -> tuple[list[int], list[float]]:
    """Return the steps whose lines have a figure, and the figure at these steps."""
    found = [(line["step"], line[figure]) for line in lines if figure in line]
    return [step for step, _ in found], [value for _, value in found]


def _directory(name: str, seed: int) -> Path:
    return DIRECTORY / f"{name}-seed-{seed}"


def _run(python: Path, name: str, seed: int) -> None:
    directory = _directory(name, seed)
    if read_record(WORK / directory).get("status") == "finished":
        return
    logger.info("%s, seed %d", name, seed)
    _enginehouse(
        python,
        directory.name,
        *("run", name, "cluster.launcher=inline", f"train.seed={seed}", f"run.directory={directory}"),
        *(f"train.validate_every={VALIDATE_EVERY}", "run.overwrite=true"),
        *(AS_IN_TRAINING if recipes()[name].command == "train" else ()),
    )


def _outcome(name: str, run: Path) -> Outcome:
    metrics = read_metrics(run)
    validations = run / "validation.jsonl"
    lines = [json.loads(line) for line in validations.open()] if validations.exists() else metrics
    greedy = final_reward(run / "model", TASK_MADE, greedy=True) if _sorts(name) else None
    steps, values = curve(lines, _figure(name))
    return Outcome(metrics[-1]["elapsed_seconds"], steps, values, _final(name, run, values), greedy)


def _final(name: str, run: Path, values: Sequence[float]) -> float:
    """Return the reward or accuracy of the model at the end of a run."""
    if _sorts(name):
        return final_reward(run / "model", TASK_MADE)
    return values[-1]


def _figure(name: str) -> str:
    """Return the name of the validation figure that is drawn."""
    return "validation/reward" if recipes()[name].command == "train" else "validation/accuracy"


def _sorts(name: str) -> bool:
    """Return True if a recipe trains a policy for the sorting task, and not a policy for a game or another model."""
    return _what(name) == "reward" and "environment" not in yaml.safe_load(recipes()[name].text)


def _what(name: str) -> str:
    """Return the figure that judges a recipe's model."""
    return "accuracy" if recipes()[name].command == "rm" else "reward"


def _enginehouse(python: Path, log: str, *words: str) -> None:
    execute([python.parent / "enginehouse", "recipes", *words], WORK / f"{log}.log", threads=1, directory=WORK)
