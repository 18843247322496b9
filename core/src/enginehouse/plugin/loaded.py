"""A plugin as the manager sees it: its source, the outcome of loading it, and its declarations."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from enginehouse.plugin.records import Record

CORE = "enginehouse"

State = Literal["ok", "blocked", "broken", "incompatible", "requirements missing"]
"""State of a plugin, in this order: usable; excluded by a switch; failed to load; written for an incompatible version
of the contract; lacks requirements of a record."""


@dataclass(slots=True, eq=False)
class Plugin:
    """A plugin and the outcome of loading it.

    Attributes:
        name: name of its entry point; for enginehouse's own plugins, the package.
        distribution: the installed distribution that contains it; `enginehouse` for enginehouse's own plugins.
        module: the module that its entry point names.
        protocol: contract version that it states; empty if it was never imported.
        status: outcome of loading. Never `"requirements missing"`, which only `enginehouse.runtimes.readiness` finds.
        problem: the problem in one line; empty if there is none.
        traceback: traceback of the error; empty if there is none.
        note: remark for the author of a working plugin; empty if there is none.
        deprecated: the deprecated parts of the contract that it uses, which are also in the note.
        withdrawn: kind and name of each record that it declared before it failed.
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
        """Return True if `name` is the name of this plugin or of its distribution."""
        return name == self.name or is_same_distribution(name, self.distribution)


class Provided(NamedTuple):
    """A record and the plugin that declared it."""

    record: Record
    plugin: Plugin


def is_same_distribution(first: str, second: str) -> bool:
    """Return True if two spellings name the same distribution (PEP 503)."""
    return canonical_name(first) == canonical_name(second)


def canonical_name(name: str) -> str:
    """Return the canonical spelling of a distribution's name (PEP 503). `packaging` has such a function too, but its
    import takes 10 ms."""
    return re.sub(r"[-_.]+", "-", name).lower()
