"""Making a runtime: a virtual environment by the standard library, filled by pip, and a manifest when it is whole.

A virtual environment cannot be moved, so it is made where it stays; until the manifest is written, last, it does not
count as there. One process at a time makes a runtime; others wait for it, and end what one left that was killed.
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
"""Called with the step that runs, and with each line it says (first with an empty one)."""

LINES_IN_ERRORS = 12
"""How many of the last lines of a step that failed its error shows."""

STEP_SECONDS = 7200.0
"""Longest a step may take: several gigabytes are fetched in one, over whatever connection there is."""

WAIT_SECONDS = 2 * STEP_SECONDS
"""Longest another process that makes the same runtime is waited for."""

_IMPORT = """
import importlib, json, sys
of, _, function = sys.argv[2].partition(":")
if of:
    getattr(importlib.import_module(of), function)()
module = importlib.import_module(sys.argv[1])
print()
print(json.dumps(str(getattr(module, "__version__", "unknown"))))
"""


def make_runtime(wanted: RuntimeRecipe, name: str | None = None, progress: Progress | None = None) -> Runtime:
    """Make a runtime, unless it is there: what is there of the same name and is not whole or of another recipe goes.

    Args:
        wanted: what it is made of.
        name: what to call it; None: after its recipe.
        progress: told what happens.

    Raises:
        MakingError: a step failed or did not end within `STEP_SECONDS`, and nothing of it is left but its log; or
            another process that makes it did not end within `WAIT_SECONDS`.
    """
    path = runtimes_folder() / (name or wanted.name)
    told = progress or (lambda step, line: None)
    with lock_runtime(path.name, WAIT_SECONDS, lambda: told(_waits_for(path.name), "")) as free:
        if not free:
            raise MakingError(
                f"runtime {path.name!r} was not made: {_waits_for(path.name)}, without an end after "
                f"{WAIT_SECONDS:.0f} s. If it hangs, end it; the same command then begins anew"
            )
        end_left_step(path.name)
        note_maker(path.name, time.time())
        try:
            return _made(path, wanted, told)
        finally:
            forget_maker(path.name)


def _made(path: Path, wanted: RuntimeRecipe, told: Progress) -> Runtime:
    """The runtime in a folder that no other process makes or removes."""
    there = read_runtime(path)
    manifest = there.manifest
    if manifest is not None and manifest.key == wanted.key and _can_start(there, manifest):
        return there
    clear(path)
    log = runtimes_folder() / ".logs" / f"{path.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    try:
        with log.open("w", encoding="utf-8") as lines:
            _make(path, wanted, _Steps(path, log, lines, told))
    except BaseException:
        clear(path)
        raise
    return read_runtime(path)


def _waits_for(name: str) -> str:
    return f"waiting for {read_maker(name) or 'another process that makes or removes it'}"


def _can_start(runtime: Runtime, manifest: Manifest) -> bool:
    """Whether the interpreter and the engine are there still."""
    return runtime.python.exists() and (not manifest.module or has_module(runtime, manifest.module))


def _make(path: Path, wanted: RuntimeRecipe, steps: _Steps) -> None:
    """Fill the folder of a runtime."""
    python = str(read_runtime(path).python)
    own_pip = not _has_pip_for_others()
    steps.run(
        "make a virtual environment",
        [sys.executable, "-m", "venv", *([] if own_pip else ["--without-pip"]), str(path)],
    )
    pip = [python, "-m", "pip"] if own_pip else [sys.executable, "-m", "pip", "--python", python]
    pip += ["install", "--no-input", "--progress-bar", "off"]
    written = path / "requirements.txt"
    written.write_text("".join(f"{line}\n" for line in wanted.requirements))
    within: list[str] = []
    if wanted.pins:
        lock = path / "lock.txt"
        lock.write_text("".join(f"{line}\n" for line in wanted.pins))
        steps.run("install what the lock pins", [*pip, "--no-deps", "-r", str(lock)])
        within = ["-c", str(lock)]
    steps.run("install what enginehouse needs" if within else "install", [*pip, *within, "-r", str(written)])
    versions = {}
    if wanted.module:
        overlay = str(make_overlay().path) if wanted.prepare else None
        said = steps.run(
            f"import {wanted.module}", [python, "-P", "-c", _IMPORT, wanted.module, wanted.prepare], overlay
        )
        versions["engine"] = json.loads(said[-1])
    if wanted.engine:
        steps.run("start what a worker starts", worker_command(python, wanted), str(make_overlay().path))
    packages = [str(read_runtime(path).packages)]
    for name in ("ray", "torch", "transformers"):
        if (version := installed_version(name, packages)) is not None:
            versions[name] = version
    versions["python"] = ".".join(map(str, sys.version_info[:3]))
    made = datetime.now(UTC).isoformat(timespec="seconds")
    Manifest(
        backend=wanted.backend, variant=wanted.variant, key=wanted.key, module=wanted.module, python=wanted.python,
        versions=versions, made=made,
    ).write(path)  # fmt: skip


def _has_pip_for_others() -> bool:
    """Whether the pip of this environment can fill another, which saves giving that one its own."""
    from packaging.version import Version

    there = installed_version("pip")
    return there is not None and Version(there) >= Version("22.3")


class _Steps:
    """Runs commands one after the other, what they say going to a log.

    Args:
        path: where they run.
        log: path of the log.
        lines: the log.
        progress: told of each step and line.
    """

    def __init__(self, path: Path, log: Path, lines: IO[str], progress: Progress):
        self._path = path
        self._log = log
        self._lines = lines
        self._progress = progress
        self._since = time.time()

    def run(self, step: str, command: Sequence[str], path: str | None = None) -> list[str]:
        """Run a command to its end; returns the lines it said.

        Args:
            step: what it does, in words.
            command: the command.
            path: a folder it imports from, before its own; None: none.

        Raises:
            MakingError: it failed, or did not end within `STEP_SECONDS`.
        """
        self._progress(step, "")
        self._lines.write(f"# {step}: {' '.join(command)}\n")
        self._path.mkdir(parents=True, exist_ok=True)
        said: list[str] = []
        # a session of its own: Ctrl-C reaches this process alone, which then ends the step with all it started
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
                said.append(line.rstrip())
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
            last = "\n".join(f"    {line}" for line in said[-LINES_IN_ERRORS:])
            how = f"did not end within {STEP_SECONDS:g} s" if late.is_set() else f"failed (exit code {code})"
            raise MakingError(
                f"runtime {self._path.name!r} was not made: the step '{step}' {how}. "
                f"All it said: {self._log}. The end of it:\n{last}"
            )
        return said


def _variables(path: str | None) -> dict[str, str]:
    """The environment of a step: without what would send pip, or an import, to another environment."""
    astray = ("PYTHONPATH", "PYTHONHOME", "PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if name not in astray}
    return kept if path is None else kept | {"PYTHONPATH": path}


def _end(process: subprocess.Popen[str]) -> None:
    """End a step, and what it started, which may outlive it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
