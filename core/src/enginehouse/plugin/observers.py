"""Calls observers one after another. A failing observer stops neither other observers nor the run."""

from __future__ import annotations

import logging
from typing import Any

import pluggy

from enginehouse.plugin import hookspecs
from enginehouse.plugin.errors import PluginError

log = logging.getLogger(__name__)

PREFIX = "enginehouse_"


def _observed_events() -> frozenset[str]:
    """Return the events: hooks that neither declare (historic) nor decide (firstresult) nor extend the command line."""
    events = set()
    for name, spec in vars(hookspecs).items():
        options = getattr(spec, f"{hookspecs.PROJECT}_spec", None)
        if options and not options["historic"] and not options["firstresult"] and name != "enginehouse_commands":
            events.add(name.removeprefix(PREFIX))
    return frozenset(events)


EVENTS = _observed_events()
"""Names of the events without the prefix `enginehouse_`."""


class Observers:
    """The observers of one plugin manager.

    Args:
        strict: True: re-raise the error of an observer as `PluginError`.
    """

    def __init__(self, manager: pluggy.PluginManager, strict: bool = False):
        self._strict = strict
        # pluggy calls the last item of its list first
        self._waiting: dict[str, list[pluggy.HookImpl]] = {
            event: list(reversed(getattr(manager.hook, PREFIX + event).get_hookimpls())) for event in EVENTS
        }

    def any(self, event: str) -> bool:
        return bool(self._waiting[event])

    def observe(self, event: str, facts: dict[str, Any]) -> None:
        """Call each observer of `event` with the `facts` that it asks for. Drop an observer that fails.

        Raises:
            KeyError: if there is no such event.
            PluginError: if an observer failed and `strict` is True.
        """
        for implementation in tuple(self._waiting[event]):
            try:
                implementation.function(*[facts[name] for name in implementation.argnames])
            except Exception as error:
                self._failed(event, implementation, error)

    def _failed(self, event: str, implementation: pluggy.HookImpl, error: Exception) -> None:
        message = (
            f"plugin {implementation.plugin_name} failed as observer of {event!r}: {type(error).__name__}: {error}"
        )
        if self._strict:
            raise PluginError(message) from error
        self._waiting[event].remove(implementation)
        # The message of a full disk or a missing file says everything.
        traceback = None if isinstance(error, OSError) else error
        log.warning("%s; this observer will not be called again", message, exc_info=traceback)
