"""`run.json` records the command, the status and the environment of a run, for people and for later commands."""

from __future__ import annotations

import errno
import json
import logging
import os
import platform
import socket
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from enginehouse.atomic import write_whole
from enginehouse.plugin.requirements import installed_versions
from enginehouse_rl.config.earlier_run import read_record
from enginehouse_rl.runs.jsonlines import read_whole_lines

log = logging.getLogger(__name__)

Status = Literal["running", "finished", "interrupted", "failed"]

OWN = ("enginehouse", "enginehouse-rl", "enginehouse-rewards")
PACKAGES = (*OWN, "torch", "transformers", "ray", "pluggy", "pydantic", "datasets", "safetensors")
"""Distributions whose versions every run records; plugins add more."""


class RunRecord:
    """The content of `run.json`, which is rewritten completely at each change.

    The record of a killed run has the status `running` until the run is resumed.

    Args:
        resumed_after: The step after which a run is resumed. The record of its earlier processes then moves to the list
            `earlier`, except for `best`.
    """

    def __init__(
        self, path: Path, command: Sequence[str], packages: Sequence[str] = (), resumed_after: int | None = None
    ):
        self.path = path
        self._started = time.monotonic()
        self.content: dict[str, Any] = {
            "status": "running",
            "started": _format_now(),
            "command": list(command),
            "directory": os.getcwd(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "python": platform.python_version(),
            "interpreter": sys.executable,
            "versions": installed_versions((*PACKAGES, *packages)),
        }
        if resumed_after is not None:
            former = dict(read_record(path.parent))
            if not former:
                log.warning("%s is damaged: its record of the run so far is lost", path)
            earlier = former.pop("earlier", [])
            earlier = earlier if isinstance(earlier, list) else []
            if former.get("status") == "running":
                rows = read_whole_lines(path.parent / "metrics.jsonl")
                former |= {"status": "killed", "seconds": seconds_logged(rows, former.get("resumed_after"))}
            # The best model belongs to the directory, not to a process, and must be recorded at any time.
            best = {"best": former.pop("best")} if "best" in former else {}
            self.content |= {"resumed_after": resumed_after, "earlier": [*earlier, former], **best}
        self._write()

    def update(self, **content: Any) -> None:
        """Add or replace entries."""
        self.content |= content
        self._write()

    def finish(self, status: Status, steps: int, error: str | None) -> None:
        """Record the end of the run, its number of steps, and its error if it failed. On a full disk, leave out entries
        until the record fits into the space of the old record.

        Raises:
            OSError: The record cannot be written even then.
        """
        end: Mapping[str, Any] = {
            "status": status,
            "ended": _format_now(),
            "seconds": round(time.monotonic() - self._started, 3),
            "steps": steps,
        }
        try:
            self.update(**end, **({"error": error} if error else {}))
        except OSError as problem:
            if problem.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            self._write_over()

    @property
    def status(self) -> Status:
        return self.content["status"]

    def _write_over(self) -> None:
        """Overwrite the file in place with the most important entries, which needs no further disk space."""
        room = self.path.stat().st_size
        for key in ("error", "roles", *self.content):
            if len(text := self._encode().encode()) <= room:
                break
            if key not in ("status", "steps"):
                self.content.pop(key, None)
        with self.path.open("r+b") as file:
            file.write(text)
            file.truncate()

    def _encode(self) -> str:
        return json.dumps(self.content, indent=2, default=str) + "\n"

    def _write(self) -> None:
        write_whole(self.path, self._encode())


def seconds_logged(rows: Iterable[Mapping[str, Any]], resumed_after: int | None) -> float:
    """Return the seconds from the start of a run's last process to its last logged step. Nothing later is known of a
    killed process.

    Args:
        rows: The rows of `metrics.jsonl`.
        resumed_after: The step after which the process resumed the run; None if the process began the run.
    """
    elapsed = [(row.get("step"), row["elapsed_seconds"]) for row in rows if _is_number(row.get("elapsed_seconds"))]
    before = next((seconds for step, seconds in elapsed if step == resumed_after), 0.0)
    return round(max([before, *(seconds for _, seconds in elapsed)]) - before, 3)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


def _format_now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
