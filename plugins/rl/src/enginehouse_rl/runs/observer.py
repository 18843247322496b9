"""Observers of a run, which `RunDirectory.tell` tells its events, one after another.

The events are the observing hooks of `hookspecs` with their arguments but `run` (`validated` also has `how`), and two
more: `opened`, with a `RunFacts` as `run`, and `alarmed`, with a row of `alarms.jsonl` as `alarm`. An error that an
observer raises is raised where the event is told.
"""

from __future__ import annotations

from typing import Any

from enginehouse.plugin import hookspecs, plugins


class Observer:
    """Takes in the events for which it has a method, such as `step_finished(self, step, metrics)`."""

    def tell(self, event: str, **content: Any) -> None:
        """Take in an event."""
        if method := getattr(self, event, None):
            method(**content)


class PluginHooks(Observer):
    """Calls the observing hooks of plugins with `run`; a hook that fails is logged and dropped."""

    def __init__(self, run: object):
        self._run = run

    def tell(self, event: str, **content: Any) -> None:
        if hasattr(hookspecs, f"enginehouse_{event}"):
            plugins().observe(event, run=self._run, **content)
