"""The process that examines a plugin: `trial.py` starts it and reads its output."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import sys
import threading
import time
from dataclasses import asdict
from importlib import metadata
from typing import IO, Any

from enginehouse.engines.declared import find_faults, locate
from enginehouse.plugin import guard
from enginehouse.plugin.declarations import DECLARING
from enginehouse.plugin.discovery import GROUP
from enginehouse.plugin.loaded import Plugin
from enginehouse.plugin.manager import HEAVY, PluginManager
from enginehouse.plugin.records import Backend, Record, ResolveError, resolve


def main(descriptor: int, plugin: tuple[str, str, str, str], seconds: float, record_seconds: float) -> None:
    """Load a plugin and examine its records. Write a line before and after loading, after each record, and at the end.

    Args:
        descriptor: file descriptor to write to.
        plugin: name, distribution, version and entry point of the plugin.
        seconds: maximum time for loading.
        record_seconds: maximum time for examining a record; after that this process ends with a stack.
    """
    os.set_inheritable(descriptor, False)
    guard.SECONDS = seconds
    answers = os.fdopen(descriptor, "w", encoding="utf-8")
    faulthandler.enable()
    _write(answers, {})
    loaded = Plugin(*plugin)
    faulthandler.dump_traceback_later(1.5 * seconds, exit=True)  # the guard ends most plugins earlier
    _write(answers, _load(loaded))
    for record in loaded.records:
        faulthandler.dump_traceback_later(record_seconds, exit=True)
        faults = find_faults(record, _declared_at(loaded, record))
        _write(answers, {"faults": [asdict(fault) for fault in faults]})
    _write(answers, {"end": True})
    os._exit(0)  # whatever threads and handlers are there now


def _load(plugin: Plugin) -> dict[str, Any]:
    """Load a plugin and report on it.

    Returns:
        `status`, `problem`, `traceback`, `protocol` and `note` of `Plugin`, the `seconds` that loading took, bytes
        `printed`, `threads` started, environment `variables` changed, the plugin's `records` by kind and name, `heavy`
        packages that a record's options import, and `warnings` of the manager.
    """
    manager, before = PluginManager(), _Before()
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("enginehouse.plugin").addHandler(handler)
    manager.load_one(plugin, metadata.EntryPoint(plugin.name, plugin.module, GROUP))
    state = {name: getattr(plugin, name) for name in ("status", "problem", "traceback", "protocol", "note")}
    report = {**state, **before.since(), "records": [[record.kind, record.name] for record in plugin.records]}
    if "enginehouse_commands" in plugin.hooks:
        from enginehouse.cli.main import LazyGroup

        manager.add_commands(LazyGroup())
    return {**report, "heavy": [_heavy_options(record) for record in plugin.records], "warnings": warnings}


def _heavy_options(record: Record) -> list[str]:
    """Import a backend's options and return the heavy packages that this imports."""
    before = set(sys.modules)
    if isinstance(record, Backend):
        with contextlib.suppress(ResolveError):
            resolve(record.options)
    return [name for name in HEAVY if name in sys.modules.keys() - before]


class _Before:
    """The state of the process before a plugin is loaded."""

    def __init__(self) -> None:
        self._variables, self._threads = dict(os.environ), set(threading.enumerate())
        self._printed, self._clock = self._size(), time.monotonic()

    def since(self) -> dict[str, Any]:
        """Return what has changed since then."""
        seconds = time.monotonic() - self._clock
        changed = {name for name, _ in self._variables.items() ^ os.environ.items()}
        return {
            "seconds": round(seconds, 3),
            "printed": self._size() - self._printed,
            "threads": [thread.name for thread in threading.enumerate() if thread not in self._threads],
            "variables": sorted(changed),
        }

    @staticmethod
    def _size() -> int:
        """Return the number of bytes printed to stderr, which is a file."""
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        return os.fstat(2).st_size


def _declared_at(plugin: Plugin, record: Record) -> str:
    """Return the place of the hook that declared a record."""
    module = sys.modules.get(plugin.module.partition(":")[0])
    hook = next((name for name, kinds in DECLARING.items() if isinstance(record, kinds)), "")
    return locate(getattr(module, hook, None)) or str(getattr(module, "__file__", None) or "")


def _write(answers: IO[str], answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()
