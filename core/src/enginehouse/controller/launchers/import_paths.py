"""Finds the driver's import paths that its workers also need: the paths of the user's code."""

from __future__ import annotations

import site
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from enginehouse.runtimes.ingredients import holds_packages

OWNED = ("stdlib", "platstdlib", "purelib", "platlib", "scripts")
"""Names in `sysconfig` of a Python environment's directories. Other directories below its prefix may be the user's."""


def own_import_paths(paths: Iterable[str], elsewhere: bool = False) -> list[str]:
    """Return the directories of `paths` (`sys.path`) that do not belong to the Python environment, as absolute paths.

    Args:
        elsewhere: True if the worker runs in another Python environment. Folders of installed packages are then left
            out too.
    """
    environment = _environment()
    return [
        str(path)
        for path in map(Path.absolute, map(Path, paths))
        if path.is_dir() and not any(path.resolve().is_relative_to(owned) for owned in environment)
        if not (elsewhere and holds_packages(path))
    ]


def _environment() -> set[Path]:
    """Return the folders of libraries and packages of the interpreter and of the base of a virtual environment."""
    installed = {sysconfig.get_paths()[name] for name in OWNED}
    installed |= {*site.getsitepackages(), *site.getsitepackages([sys.base_prefix])}
    return {Path(path).resolve() for path in installed}
