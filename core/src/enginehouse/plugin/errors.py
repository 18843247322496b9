"""Errors of plugins: mistakes of their authors, and requests of users that no plugin can meet."""

from __future__ import annotations

from typing import Literal

from enginehouse.errors import EnginehouseError, UserError

Reason = Literal["unknown", "not installed", "blocked", "broken", "incompatible", "requirements missing", "ambiguous"]


class PluginError(EnginehouseError):
    """A mistake in a plugin's declarations or hooks. The manager stores it as the plugin's problem."""


class IncompatiblePlugin(PluginError):
    """A plugin written for another version of the contract."""


class PluginLookupError(UserError):
    """A name in the config or on the command line cannot be used.

    Attributes:
        reason: the reason, which code can compare with the values of `Reason`.
    """

    def __init__(self, message: str, reason: Reason):
        super().__init__(message)
        self.reason = reason

    def __reduce__(self):
        return type(self), (str(self), self.reason)
