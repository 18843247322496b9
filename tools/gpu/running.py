"""Runs a step and writes its result."""

import atexit
import contextlib
import importlib.util
import json
import multiprocessing
import os
import runpy
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.gpu.steps import WORK, Step, slug

TAIL_CHARACTERS = 3000
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

Wait = Callable[[Step, Path, float], int | None]
"""Runs a step's command, with output to a file and a limit in seconds; returns its exit code, None after the limit."""


def commands() -> str:
    """Return a `PATH`: this Python's folder, folders `bin` made by `pip install --target`, and the present `PATH`."""
    sites = [place for path in sys.path if (place := Path(path or ".") / "bin" / "enginehouse").exists()]
    return os.pathsep.join(
        [str(Path(sys.executable).parent), *(str(site.parent) for site in sites), os.environ["PATH"]]
    )


def missing(step: Step) -> list[str]:
    """Return the modules that a step needs and that neither this Python environment nor a runtime has."""
    from enginehouse.runtimes.store import runtimes_folder

    return [
        name for name in step.needs
        if not _importable(name) and not any(runtimes_folder().glob(f"*/lib/python*/site-packages/{name}"))
    ]  # fmt: skip


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False


def in_a_shell(step: Step, log: Path, seconds: float) -> int | None:
    """Run a step in a shell, as anyone would (`Wait`)."""
    environment = ENVIRONMENT | os.environ | {"PATH": commands()}
    with log.open("w") as output:
        process = subprocess.Popen(
            step.command, shell=True, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _kill(process.pid)
            process.wait()


def forked(step: Step, log: Path, seconds: float) -> int | None:
    """Run a step in a fork of this process (`Wait`), which has imported modules that take long to import."""
    process = multiprocessing.get_context("fork").Process(target=_inside, args=(step.command, log))
    process.start()
    assert process.pid is not None
    try:
        process.join(seconds)
        return process.exitcode
    finally:
        _kill(process.pid)
        process.join()


def _inside(command: str, log: Path) -> None:
    """Run `enginehouse ...` or `python3 -m ...` as this process."""
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ["PATH"] = commands()
    program, *arguments = shlex.split(command)
    try:
        if program == "enginehouse":
            from enginehouse.cli.main import main

            sys.argv = [program, *arguments]
            main(arguments)
        else:
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()


def _kill(pid: int) -> None:
    """End a process and all processes that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def preload() -> None:
    """Import what the steps import, for `forked`."""
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401


def run(step: Step, seconds: float, wait: Wait = in_a_shell) -> dict[str, Any]:
    """Run a step for at most `seconds`; return what is written about it."""
    began = time.monotonic()
    log = WORK / f"{slug(step.name)}.log"
    code = wait(step, log, seconds)
    row: dict[str, Any] = {"command": step.command, "seconds": round(time.monotonic() - began, 1), "exit_code": code}
    problems = [f"it was ended after {seconds:.0f} s"] if code is None else [f"exit code {code}"] if code else []
    if not problems:
        try:
            row["figures"] = dict(step.figures())
            problems = step.problems(row["figures"])
        except (OSError, ValueError, LookupError) as error:
            problems = [f"its figures cannot be read: {type(error).__name__}: {error}"]
    row["passed"] = not problems
    if problems:
        row |= {"problems": problems, "end_of_output": log.read_text(errors="replace")[-TAIL_CHARACTERS:]}
    return row


def run_all(
    chosen: Sequence[Step],
    facts: Mapping[str, Any],
    path: Path,
    minutes: float,
    *,
    bare: bool = False,
    wait: Wait = in_a_shell,
) -> bool:
    """Run steps one after another, and write their results to `path` after each step.

    Args:
        chosen: the steps.
        facts: facts to write beside the results.
        path: file of the results.
        minutes: time limit of all steps.
        bare: True if missing modules do not count as failures.
        wait: function that runs a command.

    Returns:
        True if at least one step passed, and none failed except those that `bare` or a rehearsal leaves out.
    """
    began, rows = time.monotonic(), dict[str, Any]()
    for step in chosen:
        left = minutes * 60 - (time.monotonic() - began)
        print(f"{step.name} ...", flush=True)
        if step.skipped:
            row = _not_run(step, step.skipped, None)
        elif absent := missing(step):
            row = _not_run(
                step, f"{', '.join(absent)} {'is' if len(absent) == 1 else 'are'} not here", None if bare else False
            )
        elif left < 10:
            row = _not_run(step, "no time was left", False)
        else:
            row = run(step, min(step.seconds, left), wait)
        rows[step.name] = row
        said = "; ".join(row.get("problems", [])) or ", ".join(f"{k} {v:.4g}" for k, v in row["figures"].items())
        how = {True: "passed", False: "FAILED", None: ""}[row["passed"]]
        print(f"  {how} in {row['seconds']:.0f} s. {said}" if "seconds" in row else f"  {said}", flush=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            json.dumps({**facts, "minutes": round((time.monotonic() - began) / 60, 1), "steps": rows}, indent=2) + "\n"
        )
    results = [row["passed"] for row in rows.values()]
    return True in results and False not in results


def _not_run(step: Step, why: str, passed: bool | None) -> dict[str, Any]:
    return {"command": step.command, "passed": passed, "problems": [f"not run: {why}"]}
