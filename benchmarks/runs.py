"""Runs of `enginehouse train` that a benchmark times: what they start from, how they are run, what they leave."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.environments import ROOT

QUICKSTART = Path("examples/quickstart")
RUN_TIMEOUT_SECONDS = 1800.0

S = TypeVar("S")


def prepare(python: Path, directory: Path, seed: int) -> Path:
    """Make the quickstart's task in `directory`, emptied before, and a warmed-up model; returns the model's place."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    execute([python, QUICKSTART / "make_task.py", "--out", directory / "task", "--seed", seed], directory / "task.log")
    overrides = [
        f"model.path={directory / 'task' / 'model'}",
        f"data.train={directory / 'task' / 'demonstrations.jsonl'}",
        f"run.directory={directory / 'warm-up'}",
        f"train.seed={seed}",
    ]
    execute([python.parent / "enginehouse", "sft", QUICKSTART / "sft.yaml", *overrides], directory / "warm-up.log")
    return directory / "warm-up" / "model"


def quickstart(python: Path, directory: Path, model: Path, run: Path, steps: int, seed: int) -> list[object]:
    """The command that trains `model` on the task in `directory`, to which a side adds what it changes."""
    return [
        python.parent / "enginehouse", "train", QUICKSTART / "grpo.yaml",
        f"model.path={model}",
        f"data.train={directory / 'task' / 'train.jsonl'}",
        f"data.validation={directory / 'task' / 'validation.jsonl'}",
        f"train.steps={steps}", f"train.seed={seed}", f"run.directory={run}",
    ]  # fmt: skip


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Metrics of each step of a run."""
    return [json.loads(line) for line in (run / "metrics.jsonl").open()]


def rotated(sides: Mapping[str, S], number: int) -> list[tuple[str, S]]:
    """The sides in the order of a round: each round begins with another."""
    order = list(sides.items())
    return order[number % len(order) :] + order[: number % len(order)]


def with_plugin(directory: Path) -> dict[str, str]:
    """Environment variables with which a run has the plugin `benchmarks.plugin`, as if it were installed.

    Args:
        directory: where what says so is written.
    """
    info = directory / "enginehouse_benchmarks-0.1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: enginehouse-benchmarks\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[enginehouse]\nbenchmarks = benchmarks.plugin\n")
    return {"PYTHONPATH": os.pathsep.join([str(directory), str(ROOT)])}


def execute(
    command: Sequence[object], log: Path, threads: int | None = None, variables: Mapping[str, str] | None = None
) -> None:
    """Run a command from the repository's root, with what it prints in a file.

    Args:
        command: the words.
        log: that file.
        threads: value of `OMP_NUM_THREADS`; None: the program decides.
        variables: further environment variables.

    Raises:
        RuntimeError: it failed or ran out of time; with the last lines it printed.
    """
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment |= variables or {}
    if threads:
        environment["OMP_NUM_THREADS"] = str(threads)
    words = [str(word) for word in command]
    with log.open("w") as output:
        process = subprocess.Popen(words, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            code: object = process.wait(RUN_TIMEOUT_SECONDS)
        except BaseException as error:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            code = f"none within {RUN_TIMEOUT_SECONDS:g} s"
    if code != 0:
        last = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
        raise RuntimeError(f"exit code {code} of {' '.join(words)}\n{last}\n(all of it: {log})")
