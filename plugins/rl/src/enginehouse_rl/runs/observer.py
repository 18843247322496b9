"""Observers of a run, to which `RunDirectory.tell` sends events, one observer after another.

The events are the observing hooks of `hookspecs`. They have the arguments of the hooks except `run`; `validated` also
has `how`. There are two more events: `opened`, with a `RunFacts` as `run`, and `alarmed`, with a row of `alarms.jsonl`
as `alarm`. If an observer raises an error, `tell` raises it.
"""

from __future__ import annotations

from typing import Any

from enginehouse.plugin import hookspecs, plugins


class Observer:
    """Receives the events for which it has a method, such as `step_finished(self, step, metrics)`."""

    def tell(self, event: str, **content: Any) -> None:
        if method := getattr(self, event, None):
            method(**content)


class PluginHooks(Observer):
    """Calls the observing hooks of plugins with `run`. A hook that fails is logged and not called again."""

    def __init__(self, run: object):
        self._run = run

    def tell(self, event: str, **content: Any) -> None:
        if hasattr(hookspecs, f"enginehouse_{event}"):
            plugins().observe(event, run=self._run, **content)
