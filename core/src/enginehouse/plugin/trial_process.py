"""The process in which plugins are tried: `enginehouse.plugin.trial` starts it and reads what it writes."""

from __future__ import annotations

import faulthandler
import inspect
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence, Set
from importlib import metadata
from typing import IO, Any

from enginehouse.plugin.discovery import GROUP
from enginehouse.plugin.loaded import Plugin
from enginehouse.plugin.manager import HEAVY, PluginManager
from enginehouse.plugin.records import Backend, Record, ResolveError, resolve


def main(
    descriptor: int,
    plugins: Sequence[tuple[str, str, str]],
    seconds: float,
    examiner: str = "",
    examiner_seconds: float = 0.0,
) -> None:
    """Load plugins one after the other, with a line on each once it is through, and one before the first.

    Args:
        descriptor: file descriptor to write to.
        plugins: name, distribution and entry point of each.
        seconds: who reads has given a plugin up by then. A process that nobody ends, as they were killed, ends later.
        examiner: empty, or as in `trial.examine`: there is one plugin then, and a line for each answer.
        examiner_seconds: as `seconds`, for each answer.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    os.set_inheritable(descriptor, False)
    answers = os.fdopen(descriptor, "w", encoding="utf-8")
    examine = resolve(examiner) if examiner else None
    if examine:
        faulthandler.enable()
    _write(answers, {})
    before = set(sys.modules)
    for name, distribution, value in plugins:
        plugin = Plugin(name, distribution, "", value)
        _within(seconds, stack=bool(examine))
        said: dict[str, Any] = {}
        try:
            problem = _tried(plugin, value, said)
        except BaseException as error:  # what is not even an Exception would end the process that loads it
            problem = f"it raises {type(error).__name__} where it is loaded"
        _write(answers, {"problem": problem, "imported": _imported(before), **(said if examine else {})})
        if examine and not problem:
            _within(examiner_seconds, stack=True)
            for answer in examine(plugin):
                _write(answers, answer)
                _within(examiner_seconds, stack=True)
    _write(answers, {"end": True})
    os._exit(0)  # whatever threads and handlers are there now


def _within(seconds: float, stack: bool) -> None:
    """Have this process end if it hangs; before whoever reads gives it up, with a stack of where."""
    signal.setitimer(signal.ITIMER_REAL, 2 * seconds)
    if stack:
        faulthandler.dump_traceback_later(0.8 * seconds)


def _tried(plugin: Plugin, value: str, said: dict[str, Any]) -> str:
    """Load a plugin; errors of its own are found again where it is loaded for use, and are no problem here.

    What else there is to say of it goes into `said`: `seconds` it took, what it `printed`, `threads` that it started,
    environment `variables` that it set or took away, `note` of `Plugin`, its own `error`, its `records` by kind and
    name, `heavy` packages that a record's options bring, `warnings` of the manager.
    """
    manager, before = PluginManager(), _Before()
    warnings = said["warnings"] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("enginehouse.plugin").addHandler(handler)
    manager.load_one(plugin, metadata.EntryPoint(plugin.name, value, GROUP))
    records = [[one.kind, one.name] for one in plugin.records]
    said.update(before.since(), note=plugin.note, error=plugin.problem, records=records)
    if "enginehouse_commands" in plugin.hooks:
        import click

        manager.add_commands(click.Group())
    heavy = said["heavy"] = []
    for record in plugin.records:
        there = set(sys.modules)
        if problem := _options_problem(record):
            return problem
        heavy.append([name for name in HEAVY if name in sys.modules.keys() - there])
    return ""


def _imported(before: Set[str]) -> list[str]:
    """Files of the modules that were imported since, Python's own left out."""
    new = [name for name in set(sys.modules) - before if name.partition(".")[0] not in sys.stdlib_module_names]
    files = {getattr(sys.modules[name], "__dict__", {}).get("__file__") for name in new}
    return sorted(file for file in files if isinstance(file, str))


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


def _options_problem(record: Record) -> str:
    """What is wrong with a backend's options class, if it can be imported here."""
    if not isinstance(record, Backend):
        return ""
    try:
        found = resolve(record.options)
    except ResolveError:
        return ""
    from pydantic import BaseModel

    if inspect.isclass(found) and issubclass(found, BaseModel):
        return ""
    return f"{record.kind} {record.name!r}: options {record.options!r} is no pydantic model"


def _write(answers: IO[str], answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()
