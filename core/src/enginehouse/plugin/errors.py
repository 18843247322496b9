"""What can go wrong with plugins: errors of a plugin's author, and a user's request that no plugin can meet."""

from __future__ import annotations

from typing import Literal

from enginehouse.errors import EnginehouseError, UserError

Reason = Literal["unknown", "not installed", "blocked", "broken", "incompatible", "requirements missing", "ambiguous"]


class PluginError(EnginehouseError):
    """A mistake in a plugin: what it declares or how it hooks in. The manager keeps it as the plugin's own problem."""


class IncompatiblePlugin(PluginError):
    """A plugin written for another version of the contract."""


class PluginLookupError(UserError):
    """A name in the config or on the command line that cannot be used.

    Attributes:
        reason: why, as one of a few words.
    """

    def __init__(self, message: str, reason: Reason):
        super().__init__(message)
        self.reason = reason

    def __reduce__(self):
        return type(self), (str(self), self.reason)
