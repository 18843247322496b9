"""Every recipe of `enginehouse recipes list`, from nothing to a model that has learned: its curve over several seeds.

All on one task begin from the same warmed-up model, and differ in their samples and the order of their data. Policies
are judged by one sampler on the held-out prompts (`reward/NAME`), those of games by their last validation, a reward
model by held-out pairs (`accuracy/rm`). Two runs go on at once, each in one process of one thread, so `seconds/NAME` is
of a busy machine, without what a run begins from.
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
"""The recipes that the others begin from: nothing of their own is shown."""
VALIDATE_EVERY = 10
AS_IN_TRAINING = ("evaluation.sampling.temperature=1", "evaluation.max_prompts=256")
"""Overrides with which a validation draws answers as training does."""
SHOWN = {
    "validation/reward": "reward, held-out prompts",
    "validation/accuracy": "accuracy, held-out pairs",
}
"""What the figures of a validation that are drawn are called in the picture."""


@dataclass(frozen=True)
class Outcome:
    """Of one run.

    Attributes:
        seconds: from the first step to the end of the last.
        steps: after which there was a validation.
        values: what it found; the first, of the model before the first step.
        final: of the trained model, reward or accuracy.
        greedy: reward of its greedy answers; None where it gives none.
    """

    seconds: float
    steps: Sequence[int]
    values: Sequence[float]
    final: float
    greedy: float | None = None


def measure(seeds: int = 3, names: str = "", at_once: int = 2, keep: bool = False) -> dict[str, Any]:
    """Run every recipe with each seed.

    Args:
        seeds: runs of each recipe, with the seeds 0, 1, ...
        names: of the recipes, with commas between; empty: all.
        at_once: runs that go on at the same time.
        keep: take what an earlier call made and finished as it is, and run only what is not there.

    Returns:
        `metrics`, `sides`, `picture`, `versions`. Metrics, means over seeds: `reward/NAME` (of rm `accuracy/NAME`) and
        `seconds/NAME`; and `reward/sft`, of the model that those begin from which sort.

    Raises:
        RuntimeError: a run failed; with what it printed last.
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
    """The figures to keep: means over seeds."""
    final = {f"{_what(name)}/{name}": statistics.mean(one.final for one in of) for name, of in runs.items()}
    return final | {f"seconds/{name}": statistics.mean(one.seconds for one in of) for name, of in runs.items()}


def row(runs: Sequence[Outcome]) -> dict[str, float | int]:
    """A recipe's line in the table."""
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
    """The steps whose lines have a figure, and the figure."""
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
    """What the model at the end of a run is worth."""
    if _sorts(name):
        return final_reward(run / "model", TASK_MADE)
    return values[-1]


def _figure(name: str) -> str:
    """The figure of its validations that is drawn."""
    return "validation/reward" if recipes()[name].command == "train" else "validation/accuracy"


def _sorts(name: str) -> bool:
    """Whether a recipe makes a policy for the task of the recipes; else that of a game, or no policy."""
    return _what(name) == "reward" and "environment" not in yaml.safe_load(recipes()[name].text)


def _what(name: str) -> str:
    """By which figure a recipe's model is judged."""
    return "accuracy" if recipes()[name].command == "rm" else "reward"


def _enginehouse(python: Path, log: str, *words: str) -> None:
    execute([python.parent / "enginehouse", "recipes", *words], WORK / f"{log}.log", threads=1, directory=WORK)
