"""Finds the import paths of the driver that its workers need as well: those of the user's own code."""

from __future__ import annotations

import site
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from enginehouse.runtimes.ingredients import holds_packages

OWNED = ("stdlib", "platstdlib", "purelib", "platlib", "scripts")
"""Directories of a Python environment, by their names in `sysconfig`; not all that lies under its prefix is its own."""


def own_import_paths(paths: Iterable[str], elsewhere: bool = False) -> list[str]:
    """Return the directories of `paths` (`sys.path`) that are not the Python environment's, absolute.

    Args:
        paths: the paths the driver imports from.
        elsewhere: the worker runs in another environment, so it gets no folder of installed packages at all.
    """
    environment = _environment()
    return [
        str(path)
        for path in map(Path.absolute, map(Path, paths))
        if path.is_dir() and not any(path.resolve().is_relative_to(owned) for owned in environment)
        if not (elsewhere and holds_packages(path))
    ]


def _environment() -> set[Path]:
    """Return the folders of libraries and packages of the interpreter and of a virtual environment's base."""
    installed = {sysconfig.get_paths()[name] for name in OWNED}
    installed |= {*site.getsitepackages(), *site.getsitepackages([sys.base_prefix])}
    return {Path(path).resolve() for path in installed}
