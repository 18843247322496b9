"""Errors of runtimes."""

from __future__ import annotations

from enginehouse.errors import EnginehouseError, UserError


class RuntimeProblem(UserError):
    """A runtime does not exist, or cannot be used in its current state."""


class NoRuntime(RuntimeProblem):
    """An engine cannot run in this Python environment, and no runtime was made for it."""


class MakingError(EnginehouseError):
    """A runtime could not be made: a download, an installation or the engine's import failed."""
