"""Runtimes: Python environments for engines' workers, beside the driver's environment.

Runtimes allow one run to have two engines with incompatible requirements. A runtime has only third-party packages. Its
workers import core and the plugins from the driver's environment, through a folder of links (`Overlay`). This package
imports neither torch nor ray.
"""

from enginehouse.runtimes.choosing import CURRENT, OWN, RUNTIME_VARIABLE, Interpreter, choose_runtime
from enginehouse.runtimes.errors import MakingError, NoRuntime, RuntimeProblem
from enginehouse.runtimes.ingredients import RuntimeRecipe, make_recipe
from enginehouse.runtimes.making import make_runtime
from enginehouse.runtimes.overlay import Overlay, make_overlay
from enginehouse.runtimes.store import (
    Manifest,
    Runtime,
    RuntimeState,
    find_runtime,
    find_state,
    list_runtimes,
    remake_command,
    remove_runtime,
    runtimes_folder,
)  # fmt: skip
from enginehouse.runtimes.variant import detect_variant

__all__ = [
    "CURRENT",
    "OWN",
    "RUNTIME_VARIABLE",
    "Interpreter",
    "MakingError",
    "Manifest",
    "NoRuntime",
    "Overlay",
    "Runtime",
    "RuntimeProblem",
    "RuntimeRecipe",
    "RuntimeState",
    "choose_runtime",
    "detect_variant",
    "find_runtime",
    "find_state",
    "list_runtimes",
    "make_overlay",
    "make_recipe",
    "make_runtime",
    "remake_command",
    "remove_runtime",
    "runtimes_folder",
]
