"""Makes a runtime: a virtual environment of the standard library, filled by pip, and a manifest at the end.

A virtual environment cannot be moved. It is therefore made in its final place, and does not count as a runtime before
its manifest is written. Only one process at a time makes a runtime, and other processes wait for it. If that process is
killed, the next process ends the command that it left running.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from enginehouse.plugin.requirements import installed_version
from enginehouse.runtimes.errors import MakingError
from enginehouse.runtimes.ingredients import RuntimeRecipe
from enginehouse.runtimes.maker import END_SECONDS, end_left_step, forget_maker, note_maker, read_maker
from enginehouse.runtimes.overlay import make_overlay
from enginehouse.runtimes.probe import worker_command
from enginehouse.runtimes.store import Manifest, Runtime, clear, has_module, lock_runtime, read_runtime, runtimes_folder

Progress = Callable[[str, str], None]
"""Callback for progress. It gets the name of a step with an empty line when the step begins, and then with each line of
the step's output."""

LINES_IN_ERRORS = 12

STEP_SECONDS = 7200.0
"""Time limit of a step in seconds. It is long because a step may download several gigabytes."""

WAIT_SECONDS = 2 * STEP_SECONDS
"""Maximum time in seconds to wait for another process that makes the same runtime."""

_IMPORT = """
import importlib, json, sys
of, _, function = sys.argv[2].partition(":")
if of:
    getattr(importlib.import_module(of), function)()
module = importlib.import_module(sys.argv[1])
print()
print(json.dumps(str(getattr(module, "__version__", "unknown"))))
"""


def make_runtime(recipe: RuntimeRecipe, name: str | None = None, progress: Progress | None = None) -> Runtime:
    """Make a runtime, unless it exists. An incomplete runtime of this name, or a runtime of another recipe, is
    replaced.

    Args:
        name: name of the runtime; None: the recipe's name.
        progress: called with each step and line of output.

    Raises:
        MakingError: a step failed or took longer than `STEP_SECONDS`, and only its log remains; or another process did
            not finish the runtime within `WAIT_SECONDS`.
    """
    path = runtimes_folder() / (name or recipe.name)
    report = progress or (lambda step, line: None)
    with lock_runtime(path.name, WAIT_SECONDS, lambda: report(_describe_wait(path.name), "")) as free:
        if not free:
            raise MakingError(
                f"runtime {path.name!r} was not made: gave up {_describe_wait(path.name)}, after {WAIT_SECONDS:.0f} s. "
                "If that process hangs, end it and run the same command again"
            )
        end_left_step(path.name)
        note_maker(path.name, time.time())
        try:
            return _rebuild(path, recipe, report)
        finally:
            forget_maker(path.name)


def _rebuild(path: Path, recipe: RuntimeRecipe, report: Progress) -> Runtime:
    """Make a runtime in a folder that no other process uses, unless the runtime is there and complete."""
    runtime = read_runtime(path)
    manifest = runtime.manifest
    if manifest is not None and manifest.key == recipe.key and _can_start(runtime, manifest):
        return runtime
    clear(path)
    log = runtimes_folder() / ".logs" / f"{path.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    try:
        with log.open("w", encoding="utf-8") as lines:
            _make(path, recipe, _Steps(path, log, lines, report))
    except BaseException:
        clear(path)
        raise
    return read_runtime(path)


def _describe_wait(name: str) -> str:
    return f"waiting for {read_maker(name) or 'another process that makes or removes this runtime'}"


def _can_start(runtime: Runtime, manifest: Manifest) -> bool:
    """Return True if the runtime's interpreter and the engine's module still exist."""
    return runtime.python.exists() and (not manifest.module or has_module(runtime, manifest.module))


def _make(path: Path, recipe: RuntimeRecipe, steps: _Steps) -> None:
    python = str(read_runtime(path).python)
    own_pip = not _has_pip_for_others()
    steps.run(
        "make a virtual environment",
        [sys.executable, "-m", "venv", *([] if own_pip else ["--without-pip"]), str(path)],
    )
    pip = [python, "-m", "pip"] if own_pip else [sys.executable, "-m", "pip", "--python", python]
    pip += ["install", "--no-input", "--progress-bar", "off"]
    written = path / "requirements.txt"
    written.write_text("".join(f"{line}\n" for line in recipe.requirements))
    within: list[str] = []
    if recipe.pins:
        lock = path / "lock.txt"
        lock.write_text("".join(f"{line}\n" for line in recipe.pins))
        steps.run("install the packages of the lock file", [*pip, "--no-deps", "-r", str(lock)])
        within = ["-c", str(lock)]
    steps.run("install enginehouse's requirements" if within else "install", [*pip, *within, "-r", str(written)])
    versions = {}
    if recipe.module:
        overlay = str(make_overlay().path) if recipe.prepare else None
        output = steps.run(
            f"import {recipe.module}", [python, "-P", "-c", _IMPORT, recipe.module, recipe.prepare], overlay
        )
        versions["engine"] = json.loads(output[-1])
    if recipe.engine:
        steps.run("test the imports of a worker", worker_command(python, recipe), str(make_overlay().path))
    packages = [str(read_runtime(path).packages)]
    for name in ("ray", "torch", "transformers"):
        if (version := installed_version(name, packages)) is not None:
            versions[name] = version
    versions["python"] = ".".join(map(str, sys.version_info[:3]))
    made = datetime.now(UTC).isoformat(timespec="seconds")
    Manifest(
        backend=recipe.backend, variant=recipe.variant, key=recipe.key, module=recipe.module, python=recipe.python,
        versions=versions, made=made,
    ).write(path)  # fmt: skip


def _has_pip_for_others() -> bool:
    """Return True if this environment's pip can install into another environment, so that the other needs no pip."""
    from packaging.version import Version

    version = installed_version("pip")
    return version is not None and Version(version) >= Version("22.3")


class _Steps:
    """Runs commands one after the other and logs their output."""

    def __init__(self, path: Path, log: Path, lines: IO[str], progress: Progress):
        self._path = path
        self._log = log
        self._lines = lines
        self._progress = progress
        self._since = time.time()

    def run(self, step: str, command: Sequence[str], path: str | None = None) -> list[str]:
        """Run a command to its end and return the lines of its output. Raise a `MakingError` if it fails or takes too
        long."""
        self._progress(step, "")
        self._lines.write(f"# {step}: {' '.join(command)}\n")
        self._path.mkdir(parents=True, exist_ok=True)
        output: list[str] = []
        # a separate session, so that Ctrl-C reaches only this process, which then ends the step and its children
        process = subprocess.Popen(
            command, cwd=self._path, env=_variables(path), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
        note_maker(self._path.name, self._since, process.pid)
        late = threading.Event()

        def end_late() -> None:
            late.set()
            _end(process)

        watch = threading.Timer(STEP_SECONDS, end_late)
        watch.daemon = True
        watch.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                output.append(line.rstrip())
                self._lines.write(line)
                self._progress(step, line.rstrip())
            code = process.wait()
        except BaseException:
            _end(process)
            raise
        finally:
            watch.cancel()
        if code:
            self._lines.flush()
            last = "\n".join(f"    {line}" for line in output[-LINES_IN_ERRORS:])
            how = f"did not end within {STEP_SECONDS:g} s" if late.is_set() else f"failed (exit code {code})"
            raise MakingError(
                f"runtime {self._path.name!r} was not made: the step '{step}' {how}. "
                f"Its output is in {self._log}. The last lines:\n{last}"
            )
        return output


def _variables(path: str | None) -> dict[str, str]:
    """Return a step's environment variables, without variables that direct pip or imports to another environment."""
    astray = ("PYTHONPATH", "PYTHONHOME", "PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "VIRTUAL_ENV")
    variables = {name: value for name, value in os.environ.items() if name not in astray}
    return variables if path is None else variables | {"PYTHONPATH": path}


def _end(process: subprocess.Popen[str]) -> None:
    """End a step's process and all its children."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
