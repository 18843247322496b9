"""Asks another interpreter for its versions, in a separate process, before a worker starts with it."""

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
"""Time limit in seconds for the answer of an interpreter, which usually takes a tenth of a second."""

_QUESTION = """
import json, platform, sys
from importlib import metadata
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "absent"
python = "%s %d.%d" % (platform.python_implementation().lower(), sys.version_info[0], sys.version_info[1])
print(json.dumps({"python": python, "ray": version("ray"), "path": [path for path in sys.path if path]}))
"""


WORKER_SECONDS = 300.0
"""Time limit in seconds for a worker's imports. It is long because the libraries of an engine are read from disk."""

WORKER = """
import importlib, sys, types
engine, prepare = (name.partition(":") for name in sys.argv[1:])
importlib.import_module("enginehouse.controller.launchers.host")
from ray._private.serialization import SerializationContext
SerializationContext(types.SimpleNamespace())  # as each worker of Ray's (2.60) begins
if prepare[0]:
    getattr(importlib.import_module(prepare[0]), prepare[2])()
getattr(importlib.import_module(engine[0]), engine[2])
"""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """An interpreter's report about itself.

    Attributes:
        python: implementation and minor version, such as `"cpython 3.11"`.
        ray: version of Ray; `"absent"` if there is none.
    """

    python: str
    ray: str
    path: tuple[str, ...]


@lru_cache
def probe(python: str) -> ProbeResult:
    """Ask an interpreter for its versions. Answers are cached in this process. Raises `RuntimeProblem` if `python`
    cannot be started, or does not answer as a Python interpreter would."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    try:
        ran = subprocess.run(
            [python, "-P", "-c", _QUESTION],
            capture_output=True, text=True, timeout=PROBE_SECONDS, env=variables, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        answer = json.loads(ran.stdout)
        return ProbeResult(answer["python"], answer["ray"], tuple(answer["path"]))
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeProblem(f"{python} cannot be run as a Python interpreter: {error}") from error
    except (ValueError, KeyError, TypeError):
        last = (ran.stderr.strip().splitlines() or ["it printed no error"])[-1]
        raise RuntimeProblem(f"{python} does not answer as a Python interpreter of 3.8 or later: {last}") from None


def check_interpreter(python: str) -> ProbeResult:
    """Check that an interpreter can run workers of this driver. Raises `RuntimeProblem` if its Python minor version or
    its Ray version differs."""
    result = probe(python)
    wrong = []
    if result.python != python_of_this_process():
        wrong.append(f"its Python is {result.python}, but the driver's is {python_of_this_process()}")
    if result.ray != ray_version():
        wrong.append(f"its Ray is {result.ray}, but the driver's is {ray_version()}")
    if wrong:
        raise RuntimeProblem(
            f"{python} cannot run workers of this driver: {'; '.join(wrong)}. Workers need the same minor version of "
            "Python and the same version of Ray as the driver: make an environment that has both with `enginehouse "
            "runtime create ENGINE`, or install the missing versions in the environment of this interpreter"
        )
    return result


def worker_command(python: str, recipe: RuntimeRecipe) -> list[str]:
    """Return the command that runs all imports of a worker in a runtime. Run it with the path of `make_overlay()` in
    `PYTHONPATH`, so that it finds core and the plugins."""
    return [python, "-P", "-c", WORKER, recipe.engine, recipe.prepare]


def check_worker(python: str, recipe: RuntimeRecipe) -> None:
    """Run all imports of a worker in a runtime. Raises `RuntimeProblem` if an import fails. The message contains the
    last line of output, which is the exception."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    variables["PYTHONPATH"] = str(make_overlay().path)
    try:
        ran = subprocess.run(
            worker_command(python, recipe),
            capture_output=True, text=True, timeout=WORKER_SECONDS, env=variables, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeProblem(f"a worker cannot start in this runtime: {error}") from error
    if ran.returncode:
        last = (ran.stderr.strip().splitlines() or [f"exit code {ran.returncode}"])[-1]
        raise RuntimeProblem(f"a worker cannot start in this runtime: {last}")
