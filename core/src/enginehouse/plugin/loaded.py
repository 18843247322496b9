"""One plugin as the manager knows it: where it comes from, what became of loading it, what it declared."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from enginehouse.plugin.records import Record

CORE = "enginehouse"
"""Core's distribution."""

State = Literal["ok", "blocked", "broken", "incompatible", "requirements missing"]
"""What became of a plugin: usable, kept out by a switch, failed to load, for another contract, lacks its engine."""


@dataclass(slots=True, eq=False)
class Plugin:
    """A plugin and its fate.

    Attributes:
        name: its entry point's name; for enginehouse's own, its package.
        distribution: the installed distribution it comes from; `enginehouse` for all of enginehouse's own.
        version: that distribution's version.
        module: the module its entry point names.
        internal: one of enginehouse's own.
        protocol: the contract version it says it is written for; empty where it was never imported.
        status: how loading it ended. Whether requirements are missing is known to the manager alone (`states`).
        problem: one line on what is wrong; empty where nothing is.
        traceback: of the error that broke it.
        note: what its author should know, of a plugin that works; empty where there is nothing.
        deprecated: what it uses of the contract that will go; part of the note.
        hooks: names of the hooks it implements.
        records: what it declared.
        withdrawn: kind and name of what it had declared before it failed.
    """

    name: str
    distribution: str
    version: str
    module: str
    internal: bool = False
    protocol: str = ""
    status: State = "ok"
    problem: str = ""
    traceback: str = ""
    note: str = ""
    deprecated: list[str] = field(default_factory=list)
    hooks: list[str] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    withdrawn: list[tuple[str, str]] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"

    def answers_to(self, name: str) -> bool:
        """Whether `name` is this plugin's name or its distribution's."""
        return name == self.name or is_same_distribution(name, self.distribution)


class Provided(NamedTuple):
    """A record and the plugin that declared it."""

    record: Record
    plugin: Plugin


def is_same_distribution(one: str, other: str) -> bool:
    """Whether two spellings name the same distribution (PEP 503)."""
    return canonical_name(one) == canonical_name(other)


def canonical_name(name: str) -> str:
    """The one spelling of a distribution's name (PEP 503); packaging has it too, and takes 10 ms to import."""
    return re.sub(r"[-_.]+", "-", name).lower()
