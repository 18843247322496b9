"""Modules that can be imported in place of a package that is not installed, and an import hook that gives them out.

No file is written and no path changed: only the process that called `put_in` sees them.
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
"""What is stood in for, each by the module of this folder that has its name."""

ABSENT = ("triton.knobs",)
"""Modules of them that cannot be imported either: SGLang goes on without (`srt/utils/triton_load_watch.py:46`)."""


class StandIn:
    """A name of a package that is not there: names under it exist, a call of it is an error.

    Modules, functions and constants are one of these. It counts as empty and false, can be an operand of `|` as types
    are, and gives nothing to a class that has it for a base.

    Args:
        name: its full name.
    """

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return named(self, self._name, name)

    def __call__(self, *_arguments: Any, **_named: Any) -> Any:
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
    """A module whose every name is a `StandIn`, but for what it is given."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return named(self, self.__name__, name)


def named(holder: Any, path: str, name: str) -> Any:
    """What stands in for a name: a class where it is written like one. Made once, kept on what holds it.

    Args:
        holder: the module or stand-in that is asked.
        path: its full name.
        name: the name it is asked for.
    """
    full = f"{path}.{name}"
    made = _class(path, name) if name[0].isupper() and not name.isupper() else StandIn(full)
    setattr(holder, name, made)
    return made


def _class(module: str, name: str) -> type:
    """A class that can be a base, an annotation or named by `except`, and of which there can be no object."""

    def refuse(self: Any, *_arguments: Any, **_named: Any) -> None:
        raise NotOnCPU(f"{module}.{name}")

    error = name.endswith(("Error", "Exception", "OutOfResources"))
    return type(name, (Exception,) if error else (), {"__init__": refuse, "__module__": module})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives out stand-ins for packages and all their modules.

    Args:
        packages: their top-level names.
    """

    def __init__(self, packages: Sequence[str]):
        self.packages = frozenset(packages)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Called by `import`."""
        if name == "torchvision":
            from enginehouse_sglang.on_cpu import torchvision

            torchvision.declare_operators()
        if name.partition(".")[0] not in self.packages or name in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """An empty module."""
        return StandInModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Give it what this folder's module of its name defines."""
        package, _, under = module.__name__.partition(".")
        own = importlib.import_module(f"{__package__}.{package}")
        vars(module).update(own.NAMES if not under else own.NAMES_UNDER.get(under, {}))


def put_in() -> None:
    """Stand in for those of `PACKAGES` that are not installed; nothing to do a second time."""
    if any(isinstance(one, Finder) for one in sys.meta_path):
        return
    sys.meta_path.insert(0, Finder([one for one in PACKAGES if importlib.util.find_spec(one) is None]))
