"""Runs of `enginehouse train` that a benchmark times: their model and task, their execution, and their results."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.environments import ROOT

QUICKSTART = Path("examples/quickstart")
RUN_TIMEOUT_SECONDS = 1800.0
LOOK_SECONDS = 0.01

S = TypeVar("S")


def prepare(python: Path, directory: Path, seed: int) -> Path:
    """Make the quickstart's task in `directory`, emptied before, and a warmed-up model; return the model's path."""
    make_task(python, directory, seed)
    return warm_up(python, directory, seed)


def make_task(python: Path, directory: Path, seed: int, shape: Mapping[str, int] | None = None) -> None:
    """Make the quickstart's task in `directory`, emptied before.

    Args:
        python: Python of an environment with enginehouse.
        directory: directory of the task.
        seed: seed of data and weights.
        shape: changes to the model's config; its weights are then random.
    """
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    execute([python, QUICKSTART / "make_task.py", "--out", directory / "task", "--seed", seed], directory / "task.log")
    if shape:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(directory / "task" / "model")
        config.update(shape)
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config).save_pretrained(directory / "task" / "model")


def warm_up(python: Path, directory: Path, seed: int, *overrides: str) -> Path:
    """Train the model of the task in `directory` on its demonstrations; return the directory of the result."""
    command = [
        python.parent / "enginehouse", "sft", QUICKSTART / "sft.yaml",
        f"model.path={directory / 'task' / 'model'}",
        f"data.train={directory / 'task' / 'demonstrations.jsonl'}",
        f"run.directory={directory / 'warm-up'}", f"train.seed={seed}", *overrides,
    ]  # fmt: skip
    execute(command, directory / "warm-up.log")
    return directory / "warm-up" / "model"


def quickstart(python: Path, directory: Path, model: Path, run: Path, steps: int, seed: int) -> list[object]:
    """Return the command that trains `model` on the task in `directory`; a side adds its changes to it."""
    return [
        python.parent / "enginehouse", "train", QUICKSTART / "grpo.yaml",
        f"model.path={model}",
        f"data.train={directory / 'task' / 'train.jsonl'}",
        f"data.validation={directory / 'task' / 'validation.jsonl'}",
        f"train.steps={steps}", f"train.seed={seed}", f"run.directory={run}",
    ]  # fmt: skip


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Return the metrics of each step of a run."""
    return [json.loads(line) for line in (run / "metrics.jsonl").open()]


def step_seconds(lines: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the seconds from the end of each step to the end of the next, which leave nothing out."""
    return [after["elapsed_seconds"] - before["elapsed_seconds"] for before, after in pairwise(lines)]


def rotated(sides: Mapping[str, S], number: int) -> list[tuple[str, S]]:
    """Return the sides in the order of a round: each round begins with another side."""
    order = list(sides.items())
    return order[number % len(order) :] + order[: number % len(order)]


def with_plugin(directory: Path) -> dict[str, str]:
    """Return environment variables with which a run has the plugin `benchmarks.plugin`, as if it were installed.

    Args:
        directory: directory in which the plugin's metadata are written.
    """
    info = directory / "enginehouse_benchmarks-0.1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: enginehouse-benchmarks\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[enginehouse]\nbenchmarks = benchmarks.plugin\n")
    return {"PYTHONPATH": os.pathsep.join([str(directory), str(ROOT)])}


def execute(
    command: Sequence[object],
    log: Path,
    threads: int | None = None,
    variables: Mapping[str, str] | None = None,
    look: Callable[[int], object] | None = None,
    directory: Path = ROOT,
) -> None:
    """Run a command, and write its output to a file.

    Args:
        command: words of the command.
        log: file of the output.
        threads: value of `OMP_NUM_THREADS`; None: the program decides.
        variables: additional environment variables.
        look: called with the process's id every `LOOK_SECONDS`.
        directory: working directory.

    Raises:
        RuntimeError: the command failed or ran out of time; the message has the last lines that it printed.
    """
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment |= variables or {}
    if threads:
        environment["OMP_NUM_THREADS"] = str(threads)
    words = [str(word) for word in command]
    with log.open("w") as output:
        process = subprocess.Popen(words, cwd=directory, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            code: object = _end(process, look)
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


def _end(process: subprocess.Popen[bytes], look: Callable[[int], object] | None) -> int:
    """Return the exit code, within `RUN_TIMEOUT_SECONDS`."""
    if look is None:
        return process.wait(RUN_TIMEOUT_SECONDS)
    until = time.monotonic() + RUN_TIMEOUT_SECONDS
    while process.poll() is None:
        if time.monotonic() > until:
            raise subprocess.TimeoutExpired(process.args, RUN_TIMEOUT_SECONDS)
        look(process.pid)
        time.sleep(LOOK_SECONDS)
    return process.returncode
