"""Separate Python environments of benchmarks: made once under `.venvs/`, with names made of their contents."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from enginehouse.plugin import Backend
    from enginehouse.runtimes import Interpreter

logger = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"


def environment(name: str, *installs: Sequence[str], keyed_by: Sequence[Path] = ()) -> Path:
    """Return the Python of the environment `name`, and make the environment first if it is not there.

    Args:
        name: purpose of the environment; the first part of its directory's name.
        installs: arguments of `pip install`, one call each, in order. All are constrained by `constraints.txt`.
        keyed_by: files on whose contents the environment depends, besides `installs` and the constraints.

    Raises:
        subprocess.CalledProcessError: an install failed; `install.log` says how, and a later call starts over.
    """
    key = hashlib.sha256(repr((sys.version_info[:2], installs)).encode())
    for file in (CONSTRAINTS, *keyed_by):
        key.update(file.read_bytes())
    directory = ROOT / ".venvs" / f"{name}-{key.hexdigest()[:10]}"
    python, finished = directory / "bin" / "python", directory / "finished"
    if finished.exists():
        return python
    logger.info("making the Python environment %s (once; takes minutes)", directory)
    shutil.rmtree(directory, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
    pip = [str(python), "-m", "pip", "install", "-c", str(CONSTRAINTS)]
    with (directory / "install.log").open("w") as log:
        for install in installs:
            subprocess.run([*pip, *install], check=True, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
    finished.touch()
    return python


def checkout() -> Path:
    """Return the Python of an environment with this checkout's core, trainer and torch plugin; see `environment`."""
    folders = ("core", *(f"plugins/{name}" for name in ("rewards", "rl", "recipes", "torch")))
    installed = [word for folder in folders for word in ("-e", folder)]
    manifests = [ROOT / folder / "pyproject.toml" for folder in folders]
    return environment("enginehouse", ["torch"], installed, keyed_by=manifests)


def interpreter_of(record: Backend, wanted: str = "auto", device: str = "cpu") -> Interpreter:
    """Return the interpreter of a backend's workers, and make its runtime first if it needs one that is not there.

    Args:
        record: the backend.
        wanted: as `engine.runtime` in a config.
        device: torch device type.

    Raises:
        RuntimeProblem: the runtime cannot be used; `MakingError` if it could not be made.
    """
    from enginehouse.runtimes import NoRuntime, choose_runtime, make_recipe, make_runtime

    try:
        return choose_runtime(record, wanted, device)
    except NoRuntime:
        if wanted != "auto" or device not in record.runtimes:
            raise
    logger.info("making a runtime as by `enginehouse runtime create %s` (once; takes minutes)", record.name)
    make_runtime(make_recipe(record, device))
    return choose_runtime(record, wanted, device)


def plotting() -> Path:
    """Return the Python of an environment with matplotlib; see `environment`."""
    return environment("plot", ["matplotlib"])


def draw(python: Path, module: str, **given: Any) -> None:
    """Run a module that draws under the Python that `plotting` returned, with plain data."""
    subprocess.run([python, "-m", module], input=json.dumps(given), text=True, check=True, cwd=ROOT)


def versions(python: Path, *distributions: str) -> dict[str, str]:
    """Return the versions of installed distributions in the environment of `python`."""
    program = "import sys, importlib.metadata as m; print('\\n'.join(m.version(d) for d in sys.argv[1:]))"
    output = subprocess.run(
        [str(python), "-c", program, *distributions], check=True, capture_output=True, text=True
    ).stdout
    return dict(zip(distributions, output.split(), strict=True))
