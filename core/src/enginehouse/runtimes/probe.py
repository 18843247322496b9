"""What another interpreter is: asked of it, in a process of its own, as a worker could no longer say it well."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from functools import lru_cache

from enginehouse.runtimes.errors import RuntimeProblem
from enginehouse.runtimes.ingredients import python_of_this_process, ray_version

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


@dataclass(frozen=True, slots=True)
class Found:
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
def probe(python: str) -> Found:
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
        return Found(said["python"], said["ray"], tuple(said["path"]))
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeProblem(f"{python} cannot be run as a Python interpreter: {error}") from error
    except (ValueError, KeyError, TypeError):
        last = (ran.stderr.strip().splitlines() or ["it printed no error"])[-1]
        raise RuntimeProblem(f"{python} does not answer as a Python interpreter of 3.8 or later: {last}") from None


def check_interpreter(python: str) -> Found:
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
