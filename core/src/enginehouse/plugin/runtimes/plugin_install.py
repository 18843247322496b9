"""Installing a first-party plugin that is not there yet, without its engine, from where core itself came from."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path
from urllib.parse import urlparse
from urllib.request import url2pathname

from enginehouse.plugin.runtimes.errors import MakingError, RuntimeProblem
from enginehouse.plugin.runtimes.ingredients import CORE

LINES_IN_ERRORS = 8


def install_plugin(name: str) -> str:
    """Install the plugin behind one of core's extras into this Python environment.

    Args:
        name: the extra, which is the backend's name.

    Returns:
        What was installed, and from where, in a line.

    Raises:
        RuntimeProblem: this environment cannot be written, or has no pip; the message has the line to run.
        MakingError: pip failed.
    """
    what, said = _source(name)
    command = [sys.executable, "-m", "pip", "install", *what]
    line = pip_line(name)
    if not os.access(sysconfig.get_path("purelib"), os.W_OK):
        raise RuntimeProblem(
            f"the plugin of {name!r} is not installed, and this environment cannot be written. Run: {line}"
        )
    if importlib.util.find_spec("pip") is None:
        raise RuntimeProblem(f"the plugin of {name!r} is not installed, and this environment has no pip. Run: {line}")
    ran = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if ran.returncode:
        last = "\n".join(f"    {one}" for one in ran.stdout.strip().splitlines()[-LINES_IN_ERRORS:])
        raise MakingError(f"the plugin of {name!r} could not be installed by `{line}`:\n{last}")
    importlib.invalidate_caches()
    return f"installed the plugin of {name!r} into this environment, without its engine: {said}"


def pip_line(name: str) -> str:
    """The line that installs the plugin of one of core's extras, from where core came from: a checkout, or an index."""
    return "pip install " + " ".join(f'"{one}"' if "[" in one else one for one in _source(name)[0])


def _source(name: str) -> tuple[list[str], str]:
    """pip's arguments for the plugin of an extra, and where that is, in words."""
    checkout = _checkout()
    folder = checkout / "plugins" / name if checkout is not None else None
    if folder is not None and (folder / "pyproject.toml").is_file():
        return [str(folder)], f"from {folder}"
    version = metadata.version(CORE)
    return [f"{CORE}[{name}]=={version}"], f"{CORE}[{name}]=={version} from the package index"


def _checkout() -> Path | None:
    """The checkout core was installed from, by what pip noted (PEP 610); None if it was not from a folder here."""
    try:
        noted = metadata.distribution(CORE).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return None
    url = urlparse(json.loads(noted)["url"]) if noted else None
    if url is None or url.scheme != "file":
        return None
    return Path(url2pathname(url.path)).parent
