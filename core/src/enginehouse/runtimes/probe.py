"""What another interpreter is: asked of it, in a process of its own, as a worker could no longer say it well."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from functools import lru_cache

from enginehouse.runtimes.errors import RuntimeProblem
from enginehouse.runtimes.ingredients import RuntimeRecipe, python_of_this_process, ray_version
from enginehouse.runtimes.overlay import make_overlay

PROBE_SECONDS = 60.0
"""Longest an interpreter may take to answer; it takes a tenth of a second."""

_QUESTION = """
import json, platform, sys
from importlib import metadata
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "absent"
python = "%s %d.%d" % (platform.python_implementation().lower(), sys.version_info[0], sys.version_info[1])
print(json.dumps({"python": python, "ray": version("ray"), "path": [one for one in sys.path if one]}))
"""


WORKER_SECONDS = 300.0
"""Longest what a worker starts may take to start: an engine's libraries are read from a disk."""

WORKER = """
import importlib, sys, types
engine, prepare = (one.partition(":") for one in sys.argv[1:])
importlib.import_module("enginehouse.controller.launchers.host")
from ray._private.serialization import SerializationContext
SerializationContext(types.SimpleNamespace())  # as each worker of Ray's (2.60) begins
if prepare[0]:
    getattr(importlib.import_module(prepare[0]), prepare[2])()
getattr(importlib.import_module(engine[0]), engine[2])
"""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What an interpreter said of itself.

    Attributes:
        python: implementation and minor version, `"cpython 3.11"`.
        ray: version of its Ray; `"absent"` where there is none.
        path: where it imports from.
    """

    python: str
    ray: str
    path: tuple[str, ...]


@lru_cache
def probe(python: str) -> ProbeResult:
    """Ask an interpreter what it is. Answers are kept for the life of this process.

    Raises:
        RuntimeProblem: it cannot be started, or does not answer as a Python interpreter would.
    """
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    try:
        ran = subprocess.run(
            [python, "-P", "-c", _QUESTION],
            capture_output=True, text=True, timeout=PROBE_SECONDS, env=variables, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        said = json.loads(ran.stdout)
        return ProbeResult(said["python"], said["ray"], tuple(said["path"]))
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeProblem(f"{python} cannot be run as a Python interpreter: {error}") from error
    except (ValueError, KeyError, TypeError):
        last = (ran.stderr.strip().splitlines() or ["it printed no error"])[-1]
        raise RuntimeProblem(f"{python} does not answer as a Python interpreter of 3.8 or later: {last}") from None


def check_interpreter(python: str) -> ProbeResult:
    """Check that an interpreter can run workers of this driver.

    Raises:
        RuntimeProblem: its Python minor or its Ray is another.
    """
    found = probe(python)
    wrong = []
    if found.python != python_of_this_process():
        wrong.append(f"its Python is {found.python}, the driver's {python_of_this_process()}")
    if found.ray != ray_version():
        wrong.append(f"its Ray is {found.ray}, the driver's {ray_version()}")
    if wrong:
        raise RuntimeProblem(
            f"{python} cannot run workers of this driver: {'; '.join(wrong)}. Both sides need the same: make an "
            "environment with `enginehouse runtime create BACKEND`, or install that version there"
        )
    return found


def worker_command(python: str, wanted: RuntimeRecipe) -> list[str]:
    """Return the command that starts what a worker of a runtime starts; an overlay has to be on its `PYTHONPATH`."""
    return [python, "-P", "-c", WORKER, wanted.engine, wanted.prepare]


def check_worker(python: str, wanted: RuntimeRecipe) -> None:
    """Start what a worker of a runtime starts.

    Raises:
        RuntimeProblem: it does not start; with the last line it said, which is the exception.
    """
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    variables["PYTHONPATH"] = str(make_overlay().path)
    try:
        ran = subprocess.run(
            worker_command(python, wanted),
            capture_output=True, text=True, timeout=WORKER_SECONDS, env=variables, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeProblem(f"no worker starts in it: {error}") from error
    if ran.returncode:
        last = (ran.stderr.strip().splitlines() or [f"exit code {ran.returncode}"])[-1]
        raise RuntimeProblem(f"no worker starts in it: {last}")
