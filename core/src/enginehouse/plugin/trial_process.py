"""The process in which plugins are tried: `enginehouse.plugin.trial` starts it and reads what it writes."""

from __future__ import annotations

import inspect
import json
import os
import signal
from collections.abc import Sequence
from importlib import metadata
from typing import IO

from enginehouse.plugin.discovery import GROUP
from enginehouse.plugin.loaded import Plugin
from enginehouse.plugin.manager import PluginManager
from enginehouse.plugin.records import Backend, Record, ResolveError, resolve


def main(descriptor: int, plugins: Sequence[tuple[str, str, str]], examine: str, seconds: float) -> None:
    """Load plugins one after the other, with a line on each once it is through, and one before the first.

    Args:
        descriptor: file descriptor to write to.
        plugins: name, distribution and entry point of each.
        examine: as in `try_out`.
        seconds: who reads has given a plugin up by then. A process that nobody ends, as they were killed, ends later.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    os.set_inheritable(descriptor, False)
    answers = os.fdopen(descriptor, "w", encoding="utf-8")
    _write(answers, "")
    for name, distribution, value in plugins:
        wrong: list[str] = []
        signal.setitimer(signal.ITIMER_REAL, 2 * seconds)
        try:
            problem = _tried(Plugin(name, distribution, "", value), value, examine, wrong)
        except BaseException as error:  # what is not even an Exception would end the process that loads it
            problem = f"it raises {type(error).__name__} where it is loaded"
        _write(answers, problem, wrong)
    os._exit(0)  # whatever threads and handlers are there now


def _tried(plugin: Plugin, value: str, examine: str, wrong: list[str]) -> str:
    """Load a plugin; errors of its own are found again where it is loaded for use, and are no problem here."""
    manager = PluginManager()
    manager.load_one(plugin, metadata.EntryPoint(plugin.name, value, GROUP))
    if "enginehouse_commands" in plugin.hooks:
        import click

        manager.add_commands(click.Group())
    for record in plugin.records:
        if problem := _options_problem(record):
            return problem
        if examine:
            wrong += resolve(examine)(record)
    return ""


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


def _write(answers: IO[str], problem: str, wrong: list[str] | None = None) -> None:
    answers.write(json.dumps({"problem": problem, "wrong": wrong or []}) + "\n")
    answers.flush()
