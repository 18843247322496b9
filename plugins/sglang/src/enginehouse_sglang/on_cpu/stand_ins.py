"""Modules that stand in for a package that is not installed, and the import hook that finds them.

No file is written and no path changed: only the process that called `install` sees them.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from typing import Any

from enginehouse_sglang.on_cpu import NotOnCPU

PACKAGES = ("triton", "sgl_kernel")
"""Packages that have a stand-in: the module of this folder that has their name."""

ABSENT = ("triton.knobs",)
"""Modules of these packages without a stand-in, which SGLang can do without (`srt/utils/triton_load_watch.py:46`)."""


class StandIn:
    """A name of a package that is not installed, by its full name: names under it exist, and a call raises.

    It stands for a module, a function or a constant. It is false, can be an operand of `|` like a type, and adds
    nothing to a class that has it as a base.
    """

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return make_stand_in(self, self._name, name)

    def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
        raise NotOnCPU(self._name)

    def __getitem__(self, _index: Any) -> Any:
        raise NotOnCPU(self._name)

    def __bool__(self) -> bool:
        return False

    def __or__(self, other: Any) -> Any:
        return other

    __ror__ = __or__

    def __mro_entries__(self, _bases: tuple[Any, ...]) -> tuple[Any, ...]:
        return ()

    def __repr__(self) -> str:
        return f"<stand-in for {self._name}, which needs a GPU>"


class StandInModule(types.ModuleType):
    """A module in which every name that was not set is a stand-in."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return make_stand_in(self, self.__name__, name)


def make_stand_in(holder: Any, path: str, name: str) -> Any:
    """Add a stand-in called `name` to `holder`, whose full name is `path`: a class if it has a class's name."""
    is_class = name[0].isupper() and not name.isupper()
    stand_in = _make_class(path, name) if is_class else StandIn(f"{path}.{name}")
    setattr(holder, name, stand_in)
    return stand_in


def _make_class(module: str, name: str) -> type:
    """Return a class without objects, which can be a base, an annotation or named by `except`."""

    def refuse(self: Any, *_args: Any, **_kwargs: Any) -> None:
        raise NotOnCPU(f"{module}.{name}")

    error = name.endswith(("Error", "Exception", "OutOfResources"))
    return type(name, (Exception,) if error else (), {"__init__": refuse, "__module__": module})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import hook that finds stand-ins for packages, by their top-level names, and for all their modules."""

    def __init__(self, packages: Sequence[str]):
        self.packages = frozenset(packages)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name == "torchvision":
            from enginehouse_sglang.on_cpu import torchvision

            torchvision.declare_operators()
        if name.partition(".")[0] not in self.packages or name in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return StandInModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Add the names that this folder's module of the same name defines."""
        package, _, under = module.__name__.partition(".")
        stand_in = importlib.import_module(f"{__package__}.{package}")
        vars(module).update(stand_in.NAMES if not under else stand_in.NAMES_UNDER.get(under, {}))


def install() -> None:
    """Stand in for the `PACKAGES` that are not installed; a second call does nothing."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder([name for name in PACKAGES if importlib.util.find_spec(name) is None]))
