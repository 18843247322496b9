"""Old import paths of the trainer, which has its own distribution now. Imports from here work, with a warning.

Modules whose names are in the contract have a file here. `_Earlier` finds all other modules, for example for rewards
that an earlier `init` wrote.
"""

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from enginehouse.plugin.deprecation import deprecated


class _Earlier(MetaPathFinder, Loader):
    """Imports a module from its new import path."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(f"{__name__}."):
            return None
        place = Path(__file__).parent.joinpath(*fullname.removeprefix(f"{__name__}.").split("."))
        return None if place.is_dir() or place.with_suffix(".py").is_file() else ModuleSpec(fullname, self)

    def exec_module(self, module: ModuleType) -> None:
        earlier = module.__name__
        name = earlier.removeprefix(f"{__name__}.")
        now = f"enginehouse_{name}" if name.startswith("rewards.builtin") else f"enginehouse_rl.{name}"
        sys.modules[earlier] = importlib.import_module(now)
        warnings.warn(deprecated(earlier, since="1.1", instead=now), stacklevel=2)


if not any(isinstance(finder, _Earlier) for finder in sys.meta_path):
    sys.meta_path.insert(0, _Earlier())  # first, so that no other finder loads a file again under its old name
