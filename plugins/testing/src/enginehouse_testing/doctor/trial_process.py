"""The process in which a plugin is examined: `trial.py` starts it and reads what it writes."""

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
    """Load a plugin and have it examined, with a line before, one of loading it, one an answer, and one at the end.

    Args:
        descriptor: file descriptor to write to.
        plugin: its name, distribution, version and entry point.
        seconds: longest it may take to be loaded.
        record_seconds: longest a record may take to be examined. This process ends then, with a stack of where it was.
    """
    os.set_inheritable(descriptor, False)
    guard.SECONDS = seconds
    answers = os.fdopen(descriptor, "w", encoding="utf-8")
    faulthandler.enable()
    _write(answers, {})
    loaded = Plugin(*plugin)
    faulthandler.dump_traceback_later(1.5 * seconds, exit=True)  # the guard gives most up before
    _write(answers, _load(loaded))
    for record in loaded.records:
        faulthandler.dump_traceback_later(record_seconds, exit=True)
        faults = find_faults(record, _declared_at(loaded, record))
        _write(answers, {"faults": [asdict(fault) for fault in faults]})
    _write(answers, {"end": True})
    os._exit(0)  # whatever threads and handlers are there now


def _load(plugin: Plugin) -> dict[str, Any]:
    """Load a plugin and return what there is to say of it.

    These are `status`, `problem`, `traceback`, `protocol` and `note` of `Plugin`, `seconds` it took, what it `printed`,
    `threads` that it started, environment `variables` that it set or took away, its `records` by kind and name, `heavy`
    packages that a record's options bring, and `warnings` of the manager.
    """
    manager, before = PluginManager(), _Before()
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("enginehouse.plugin").addHandler(handler)
    manager.load_one(plugin, metadata.EntryPoint(plugin.name, plugin.module, GROUP))
    state = {name: getattr(plugin, name) for name in ("status", "problem", "traceback", "protocol", "note")}
    said = {**state, **before.since(), "records": [[record.kind, record.name] for record in plugin.records]}
    if "enginehouse_commands" in plugin.hooks:
        from enginehouse.cli.main import LazyGroup

        manager.add_commands(LazyGroup())
    return {**said, "heavy": [_heavy_options(record) for record in plugin.records], "warnings": warnings}


def _heavy_options(record: Record) -> list[str]:
    """Import a backend's options and return the heavy packages that come with them."""
    there = set(sys.modules)
    if isinstance(record, Backend):
        with contextlib.suppress(ResolveError):
            resolve(record.options)
    return [name for name in HEAVY if name in sys.modules.keys() - there]


class _Before:
    """The state of the process before a plugin is loaded."""

    def __init__(self) -> None:
        self._variables, self._threads = dict(os.environ), set(threading.enumerate())
        self._printed, self._clock = self._size(), time.monotonic()

    def since(self) -> dict[str, Any]:
        """What has become of it."""
        seconds = time.monotonic() - self._clock
        changed = {name for name, _ in self._variables.items() ^ os.environ.items()}
        return {
            "seconds": round(seconds, 3),
            "printed": self._size() - self._printed,
            "threads": [one.name for one in threading.enumerate() if one not in self._threads],
            "variables": sorted(changed),
        }

    @staticmethod
    def _size() -> int:
        """Bytes that were printed to stderr, where that is a file."""
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        return os.fstat(2).st_size


def _declared_at(plugin: Plugin, record: Record) -> str:
    """Return where the hook stands that declared a record."""
    module = sys.modules.get(plugin.module.partition(":")[0])
    hook = next((name for name, kinds in DECLARING.items() if isinstance(record, kinds)), "")
    return locate(getattr(module, hook, None)) or str(getattr(module, "__file__", None) or "")


def _write(answers: IO[str], answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()
