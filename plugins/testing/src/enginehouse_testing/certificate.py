"""Certificates: the results of a conformance run, as JSON for machines and as a table for people."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from enginehouse.atomic import write_whole
from enginehouse.plugin.requirements import installed_versions, parse_requirement
from enginehouse_testing.model_under_test import TINY, ModelUnderTest
from enginehouse_testing.origin import Commit, Origin, required_plugins

Outcome = Literal["passed", "failed", "warning", "not declared", "not run"]


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one check at one layout.

    Attributes:
        name: the check's name.
        capability: the check's capability; `"protocol"` if every engine must pass the check.
        layout: name of the layout; two names, joined by an arrow, if a checkpoint went from one layout to the other;
            empty if the check's capability is not declared.
        tolerance: largest error that passes.
        measured: the error; None if nothing was measured, not finite for a mistake without a size.
        outcome: `"warning"` if the check failed and is newer than the contract version of the plugin.
        detail: a description of the error and its place.
    """

    name: str
    capability: str
    layout: str
    tolerance: float
    measured: float | None
    outcome: Outcome
    detail: str = ""


@dataclass(slots=True)
class Certificate:
    """The results of the checks of one record.

    Attributes:
        backend: the record's name.
        checks: results, in the order of the run.
        finished: False until all chosen checks have run.
        whole: False if only some checks or layouts were chosen. `passed` is then False.
        kind: the record's kind: `"train"`, `"loss"`, ...
        runtime: versions of the engine's dependencies, if it ran in its own Python environment; else empty.
        device: device on which the engine ran, except in checks that run only on GPUs; empty for a record that is no
            engine.
        depends: additional distributions whose installed versions the certificate lists.
        origin: the record's distribution and the digest of its code, or None if unknown.
        commit: commit of the checkout that contains the code, or None.
        model: the model that an engine was checked with.
        options: options that an engine was given, which replace those of its layouts.
    """

    backend: str
    whole: bool = True
    finished: bool = False
    checks: list[Result] = field(default_factory=list)
    kind: str = "train"
    runtime: dict[str, str] = field(default_factory=dict)
    device: str = ""
    depends: Sequence[str] = ()
    origin: Origin | None = None
    commit: Commit | None = None
    model: ModelUnderTest = TINY
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def failed(self) -> list[Result]:
        """Results that failed."""
        return [check for check in self.checks if check.outcome == "failed"]

    @property
    def clean(self) -> bool:
        """True if all chosen checks have run, at least one passed, and none failed."""
        return self.finished and not self.failed and any(check.outcome == "passed" for check in self.checks)

    @property
    def passed(self) -> bool:
        """True if all checks of the declared capabilities passed at every declared layout. Checks that could not run,
        because they need a missing GPU or another model, do not count."""
        return self.clean and self.whole

    def as_json(self) -> dict[str, Any]:
        """Return plain data. Numbers that are not finite become text, because JSON cannot express them."""
        checks = [asdict(check) for check in self.checks]
        for check in checks:
            if check["measured"] is not None and not math.isfinite(check["measured"]):
                check["measured"] = str(check["measured"])
        return {
            "commit": None if self.commit is None else asdict(self.commit),
            "written": datetime.now(UTC).isoformat(timespec="seconds"),
            "backend": self.backend,
            "kind": self.kind,
            "device": self.device,
            "model": self.model.label,
            "options": dict(self.options),
            "plugin": None if self.origin is None else asdict(self.origin),
            "passed": self.passed,
            "interrupted": not self.finished,
            "whole": self.whole,
            "checks": checks,
            "versions": versions(*([] if self.origin is None else [self.origin.distribution]), *self.depends),
            "runtime": self.runtime,
            "machine": machine(),
        }

    def write(self, directory: str | Path) -> None:
        """Write `certificate.json` and `certificate.md`. Each file is replaced atomically."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        write_whole(directory / "certificate.json", json.dumps(self.as_json(), indent=2) + "\n")
        write_whole(directory / "certificate.md", self.as_markdown())

    def as_markdown(self) -> str:
        """Return a table of all results."""
        ran_with = ", ".join(f"{name} {version}" for name, version in self.runtime.items())
        lines = [
            f"# {self.backend} ({self.kind}): {self.verdict()}",
            "",
            *([f"Commit: {self.commit}", ""] if self.commit else []),
            *([f"Plugin: {self.origin}", ""] if self.origin else []),
            *([f"Model: {self.model}", ""] if self.model.label else []),
            *([f"Options: {json.dumps(dict(self.options))}", ""] if self.options else []),
            *([f"Device: {self._device_line()}", ""] if self.device else []),
            *([f"Runtime: {ran_with}", ""] if ran_with else []),
            "| check | capability | layout | measured | tolerance | outcome | detail |",
            "|---|---|---|---|---|---|---|",
        ]
        for check in self.checks:
            cells = (*row(check), check.detail.splitlines()[0] if check.detail else "")
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        return "\n".join(lines) + "\n"

    def _device_line(self) -> str:
        gpus = machine()["gpus"] if self.device == "cuda" else []
        return f"{self.device} ({', '.join(gpus)})" if gpus else self.device

    def verdict(self) -> str:
        """Describe the state of the certificate."""
        counts = dict.fromkeys(("passed", "failed", "warning", "not run", "not declared"), 0)
        for check in self.checks:
            counts[check.outcome] += 1
        numbers = ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count) or "nothing run"
        if not self.finished:
            return f"interrupted ({numbers})"
        word = "failed" if self.failed else "passed" if self.passed else "not the whole suite"
        return f"{word} ({numbers})"


def row(check: Result) -> tuple[str, ...]:
    """Return the table cells of a result, without its detail."""
    measured = "" if check.measured is None else f"{check.measured:.2g}"
    tolerance = "" if check.measured is None else "exact" if check.tolerance == 0 else f"{check.tolerance:g}"
    return check.name, check.capability, check.layout, measured, tolerance, check.outcome


def versions(*distributions: str) -> dict[str, str]:
    """Return the versions of packages that every result depends on, and of additional distributions."""
    names = ("enginehouse", "torch", "transformers", "accelerate", "peft", "ray", *filter(None, distributions))
    return {"python": platform.python_version()} | installed_versions(names)


def depends_on(record: Any) -> list[str]:
    """Return the distributions on whose versions a backend's results depend: the requirements of the backend, of its
    plugin and of all engines."""
    required = [requirement.name for text in getattr(record, "requires", ()) for requirement in parse_requirement(text)]
    return list(dict.fromkeys([*required, *required_plugins(record), "torch", "transformers", "ray"]))


def machine() -> dict[str, Any]:
    """Describe this machine."""
    import psutil
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "platform": platform.platform(),
        "processor": platform.machine(),
        "cpus": psutil.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": gpus,
    }
