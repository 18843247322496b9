"""Installs a missing plugin of enginehouse, without its engine, from the same source as core."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
import sysconfig

from enginehouse.plugin.first_party import pip_line, plugin_source
from enginehouse.runtimes.errors import MakingError, RuntimeProblem

LINES_IN_ERRORS = 8


def install_plugin(name: str) -> str:
    """Install the plugin of one of core's extras into this Python environment.

    Args:
        name: the extra, which has the engine's name.

    Returns:
        One line that names the installed plugin and its source.

    Raises:
        RuntimeProblem: this Python environment cannot be written, or has no pip. The message names the command to run.
        MakingError: pip failed.
    """
    packages, source = plugin_source(name)
    command = [sys.executable, "-m", "pip", "install", *packages]
    line = pip_line(name)
    if not os.access(sysconfig.get_path("purelib"), os.W_OK):
        raise RuntimeProblem(
            f"the plugin of {name!r} is not installed, and this Python environment cannot be written. Run: {line}"
        )
    if importlib.util.find_spec("pip") is None:
        raise RuntimeProblem(
            f"the plugin of {name!r} is not installed, and this Python environment has no pip. Run: {line}"
        )
    ran = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if ran.returncode:
        last = "\n".join(f"    {line}" for line in ran.stdout.strip().splitlines()[-LINES_IN_ERRORS:])
        raise MakingError(f"the plugin of {name!r} could not be installed by `{line}`:\n{last}")
    importlib.invalidate_caches()
    return f"installed the plugin of {name!r} into this Python environment, without its engine: {source}"
