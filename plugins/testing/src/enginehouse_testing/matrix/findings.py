"""All findings of the matrix, in the JSON file beside the page: written after each finding, and read to continue."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from enginehouse.atomic import write_whole
from enginehouse.errors import DataError
from enginehouse_testing.certificate import machine
from enginehouse_testing.matrix.combination import KINDS, Combination
from enginehouse_testing.matrix.page import render
from enginehouse_testing.matrix.row import MatrixRow
from enginehouse_testing.origin import head

FORM = 1
"""Version of the file's format."""

SAME_MACHINE = ("processor", "cpus", "gpus")
"""Properties that two machines must share before their results may stand on one page."""


@dataclass(slots=True)
class MatrixFindings:
    """Findings on one machine.

    Attributes:
        command: command that writes the page again.
        plugin: the plugin that the page is limited to; empty: all backends and transports.
        machine: description of the machine, as in a certificate.
        commit: commit of the checkout in which the findings were last written, or empty.
        written: time when the findings were last written, ISO 8601 in UTC.
        certificates: summaries of certificates, as `certified` makes them, by `(kind, name, model)`.
        rows: rows by combination.
    """

    command: str = ""
    plugin: str = ""
    machine: Mapping[str, Any] = field(default_factory=machine)
    commit: str = ""
    written: str = ""
    certificates: dict[tuple[str, str, str], dict[str, Any]] = field(default_factory=dict)
    rows: dict[Combination, MatrixRow] = field(default_factory=dict)

    def add(self, finding: MatrixRow | dict[str, Any]) -> None:
        """Add a row or a certificate, or replace the former one."""
        if isinstance(finding, MatrixRow):
            self.rows[finding.combination] = finding
        else:
            self.certificates[finding["kind"], finding["backend"], finding.get("model", "")] = finding

    def sort(self, combinations: Sequence[Combination]) -> None:
        """Order rows and certificates as in `combinations`, whatever their model; others come last."""
        first = {combination: number for number, combination in enumerate(combinations)}
        self.rows = dict(
            sorted(
                self.rows.items(),
                key=lambda item: (item[0].model, first.get(replace(item[0], model=""), len(first))),
            )
        )
        parts = [(kind, getattr(combination, kind)) for kind in KINDS for combination in combinations]
        order = {part: number for number, part in reversed(list(enumerate(parts)))}
        self.certificates = dict(
            sorted(self.certificates.items(), key=lambda item: (item[0][2], order.get(item[0][:2], len(parts))))
        )

    def write(self, page: Path) -> None:
        """Write the page, and beside it the JSON with its findings. Each file is replaced atomically."""
        self.commit = head()
        self.written = datetime.now(UTC).isoformat(timespec="seconds")
        page.parent.mkdir(parents=True, exist_ok=True)
        write_whole(json_beside(page), json.dumps(self.as_json(), indent=1, allow_nan=False) + "\n")
        write_whole(page, render(self, json_beside(page).name))

    def as_json(self) -> dict[str, Any]:
        """Return plain data."""
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
    def from_json(cls, content: Mapping[str, Any]) -> MatrixFindings:
        """Read what `as_json` returned."""
        findings = cls(
            command=content["command"],
            plugin=content.get("plugin", ""),
            machine=content["machine"],
            commit=content.get("commit", ""),
            written=content["written"],
        )
        for finding in (*content["certificates"], *map(MatrixRow.from_json, content["rows"])):
            findings.add(finding)
        return findings


def json_beside(page: Path) -> Path:
    """Return the path of a page's JSON file."""
    return page.with_suffix(".json")


def earlier_findings(page: Path) -> MatrixFindings:
    """Return the findings of a page that was made on this or a similar machine, else empty findings.

    Raises:
        DataError: the file beside the page was not written by this command.
    """
    path, here = json_beside(page), machine()
    if not path.exists():
        return MatrixFindings(machine=here)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["form"] != FORM:
            return MatrixFindings(machine=here)
        findings = MatrixFindings.from_json(content)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path} is not what `enginehouse matrix` writes beside its page ({type(error).__name__}: {error}); "
            "remove it, or choose another --output"
        ) from error
    similar = all(findings.machine.get(name) == here[name] for name in SAME_MACHINE)
    findings.machine = here
    return findings if similar else MatrixFindings(machine=here)
