"""Runtimes: Python environments in which an engine's worker runs, beside the one the driver runs in.

Two engines whose requirements exclude each other can so be in one run. A runtime holds third-party packages only; core
and the plugins a worker sees are the driver's own, by an overlay of links. Light: neither torch nor ray is imported.
"""

from enginehouse.runtimes.choosing import CURRENT, OWN, RUNTIME_VARIABLE, Interpreter, choose_runtime
from enginehouse.runtimes.errors import MakingError, NoRuntime, RuntimeProblem
from enginehouse.runtimes.ingredients import Recipe, recipe
from enginehouse.runtimes.making import make_runtime
from enginehouse.runtimes.overlay import Overlay, make_overlay
from enginehouse.runtimes.store import (
    Manifest,
    Runtime,
    State,
    folder,
    installed_runtimes,
    named_runtime,
    remaking,
    remove_runtime,
    state_of,
)  # fmt: skip
from enginehouse.runtimes.variant import variant_here

__all__ = [
    "CURRENT",
    "OWN",
    "RUNTIME_VARIABLE",
    "Interpreter",
    "MakingError",
    "Manifest",
    "NoRuntime",
    "Overlay",
    "Recipe",
    "Runtime",
    "RuntimeProblem",
    "State",
    "choose_runtime",
    "folder",
    "installed_runtimes",
    "make_overlay",
    "make_runtime",
    "named_runtime",
    "recipe",
    "remaking",
    "remove_runtime",
    "state_of",
    "variant_here",
]
