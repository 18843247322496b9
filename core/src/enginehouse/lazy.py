"""Lets a package import each of its names at the first use of that name, so that importing the package is fast."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def exports(package: str, names: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Make the module-level `__getattr__` (PEP 562) of a package.

    Args:
        package: `__name__` of the package.
        names: names that the package exports, by the module that defines them.
    """
    modules = {name: module for module, exported in names.items() for name in exported}

    def __getattr__(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"{package}.{modules[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return __getattr__
