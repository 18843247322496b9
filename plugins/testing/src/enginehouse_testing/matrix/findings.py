"""All that was found, as the JSON file beside the page: read to go on from, written after every finding."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from enginehouse.atomic import write_whole
from enginehouse.errors import DataError
from enginehouse_testing.certificate import machine
from enginehouse_testing.matrix.combination import KINDS, Combination
from enginehouse_testing.matrix.page import render
from enginehouse_testing.matrix.row import Row
from enginehouse_testing.origin import head

FORM = 1
"""The form of the file."""

SAME_MACHINE = ("processor", "cpus", "gpus")
"""What two machines have alike if figures of one go beside those of the other."""


@dataclass(slots=True)
class Findings:
    """What was found on one machine.

    Attributes:
        command: what writes the page anew.
        plugin: whose backends and transports alone are on the page; empty: all that there are.
        machine: where, as in a certificate.
        commit: of the checkout that it was last written in; empty where it was in none.
        written: when, ISO 8601 in UTC.
        certificates: each in short, as of `certified`, by `(kind, name)`.
        rows: by combination.
    """

    command: str = ""
    plugin: str = ""
    machine: Mapping[str, Any] = field(default_factory=machine)
    commit: str = ""
    written: str = ""
    certificates: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    rows: dict[Combination, Row] = field(default_factory=dict)

    def add(self, found: Row | dict[str, Any]) -> None:
        """Take in a row, or a certificate, in the place of what was found before."""
        if isinstance(found, Row):
            self.rows[found.combination] = found
        else:
            self.certificates[found["kind"], found["backend"]] = found

    def sort(self, combinations: Sequence[Combination]) -> None:
        """Put rows and certificates in the order of some combinations; what is not among them comes last."""
        first = {combination: number for number, combination in enumerate(combinations)}
        self.rows = dict(sorted(self.rows.items(), key=lambda one: first.get(one[0], len(first))))
        parts = [(kind, getattr(one, kind)) for kind in KINDS for one in combinations]
        order = {part: number for number, part in reversed(list(enumerate(parts)))}
        self.certificates = dict(sorted(self.certificates.items(), key=lambda one: order.get(one[0], len(parts))))

    def write(self, page: Path) -> None:
        """Write the page, and beside it the JSON it is made of; each replaced in one step."""
        self.commit = head()
        self.written = datetime.now(UTC).isoformat(timespec="seconds")
        page.parent.mkdir(parents=True, exist_ok=True)
        write_whole(json_beside(page), json.dumps(self.as_json(), indent=1, allow_nan=False) + "\n")
        write_whole(page, render(self, json_beside(page).name))

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "commit": self.commit,
            "written": self.written,
            "form": FORM,
            "command": self.command,
            "plugin": self.plugin,
            "machine": dict(self.machine),
            "certificates": list(self.certificates.values()),
            "rows": [row.as_json() for row in self.rows.values()],
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Findings:
        """What `as_json` wrote."""
        found = cls(
            command=content["command"],
            plugin=content.get("plugin", ""),
            machine=content["machine"],
            commit=content.get("commit", ""),
            written=content["written"],
        )
        for one in (*content["certificates"], *map(Row.from_json, content["rows"])):
            found.add(one)
        return found


def json_beside(page: Path) -> Path:
    """The JSON file of a page."""
    return page.with_suffix(".json")


def earlier_findings(page: Path) -> Findings:
    """What was found earlier on this machine, or one like it; nothing where there is no page, or one of another.

    Raises:
        DataError: what stands there was not written by this command.
    """
    path, here = json_beside(page), machine()
    if not path.exists():
        return Findings(machine=here)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["form"] != FORM:
            return Findings(machine=here)
        found = Findings.from_json(content)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path} is not what `enginehouse matrix` writes beside its page ({type(error).__name__}: {error}); "
            "remove it, or choose another --output"
        ) from error
    alike = all(found.machine.get(name) == here[name] for name in SAME_MACHINE)
    found.machine = here
    return found if alike else Findings(machine=here)
