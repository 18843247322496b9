"""Examines a plugin in a separate process, which the plugin may end, block or print from."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from importlib.machinery import PathFinder, all_suffixes
from pathlib import Path
from typing import Any

from enginehouse.plugin import guard
from enginehouse.plugin.loaded import Plugin

LONGEST_SECONDS = 3600.0
"""Time limit for an examination, for the case that the time limits inside the other process fail."""

RECORD_SECONDS = 300.0
"""Time limit for examining a record. It is long, because importing an engine takes a while."""

_PROGRAM = """
import faulthandler, json, sys
faulthandler.dump_traceback_later(60, exit=True)
asked = json.loads(sys.argv[2])
sys.path[:] = asked.pop("path") or sys.path
from enginehouse_testing.doctor.trial_process import main
main(int(sys.argv[1]), **asked)
"""

_SUFFIXES = tuple(all_suffixes())

Candidate = tuple[Plugin, metadata.EntryPoint]


@dataclass(frozen=True, slots=True)
class Examined:
    """The result of a plugin's examination in another process.

    Attributes:
        loaded: the report of `trial_process` on loading; empty if the process did not get so far.
        answers: the mistakes in each of the plugin's records, in order.
        problem: reason why the process ended early, or empty.
        output: everything that the process printed, with Python's stacks if it hung or crashed.
    """

    loaded: Mapping[str, Any]
    answers: tuple[Mapping[str, Any], ...]
    problem: str
    output: str


def examine(candidate: Candidate, python: str | None = None, env: Mapping[str, str] | None = None) -> Examined | None:
    """Load a plugin in its own process, and examine its records there.

    Args:
        candidate: the plugin.
        python: interpreter of another Python environment; None: this environment.
        env: environment variables for that interpreter.

    Returns:
        The result, or None if no process could be started.
    """
    plugin, _ = candidate
    arguments = {
        "path": [] if python else [folder for folder in sys.path if isinstance(folder, str)],
        "plugin": [plugin.name, plugin.distribution, plugin.version, plugin.module],
        "seconds": guard.SECONDS,
        "record_seconds": RECORD_SECONDS,
    }
    with tempfile.TemporaryFile("w+", encoding="utf-8") as answers, tempfile.TemporaryFile() as output:
        try:
            # Its own session, because Ctrl-C is meant for this process, which ends the other one.
            process = subprocess.Popen(
                [python or sys.executable, "-P", "-c", _PROGRAM, str(answers.fileno()), json.dumps(arguments)],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                pass_fds=(answers.fileno(),), start_new_session=True, env={**os.environ, **(env or {})},
            )  # fmt: skip
        except OSError:
            return None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LONGEST_SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # and every process that it has started
            code = process.wait()
        answers.seek(0)
        began, *lines = [json.loads(line) for line in answers if line.endswith("\n")] or [None]
        output.seek(0)
        printed = output.read().decode(errors="replace")
    if began is None:
        return None
    ended = bool(lines) and "end" in lines[-1]
    loaded, *faults = lines[: len(lines) - ended] or [{}]
    problem = "" if ended else _ending(code, printed, RECORD_SECONDS if loaded else guard.SECONDS)
    return Examined(loaded, tuple(faults), problem, printed)


def _ending(code: int, printed: str, seconds: float) -> str:
    if code == 1 and "Timeout (" in printed:  # faulthandler ends a process so
        return f"it was not loaded within {seconds:g} s"
    return f"it ends the process that loads it, {f'with exit code {code}' if code >= 0 else f'by signal {-code}'}"


def sources(module: str) -> list[Path]:
    """Return the importable files of a module's outermost package (no namespace package), sorted; import nothing."""
    name, *inner = module.split(".")
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return []
    while inner and spec and spec.origin is None and spec.submodule_search_locations is not None:
        name = f"{name}.{inner.pop(0)}"
        spec = PathFinder.find_spec(name, spec.submodule_search_locations) or spec
    if spec is None:
        return []
    if spec.submodule_search_locations is None:
        return [Path(spec.origin)] if spec.origin and Path(spec.origin).is_file() else []
    walks = (walk for folder in spec.submodule_search_locations for walk in os.walk(folder))
    folders = [(folder, files) for folder, _, files in walks if os.path.basename(folder) != "__pycache__"]
    return sorted(Path(folder, file) for folder, files in folders for file in files if file.endswith(_SUFFIXES))
