"""Reads the files that an earlier run left in a run directory. Any file may be damaged."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from enginehouse.jsontext import decode_json
from enginehouse_rl.checkpoints import list_checkpoints
from enginehouse_rl.config.counting import count

RUN_MARKER = "run.json"
"""The file that marks a run directory. Directories without it are never deleted."""


def read_record(directory: Path) -> Mapping[str, Any]:
    """Return the content of a run's `run.json`; empty if it is damaged or missing."""
    try:
        content = decode_json((directory / RUN_MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def count_steps(record: Mapping[str, Any]) -> int:
    """Return the number of steps that a run took, from its record; 0 if the record does not contain the number."""
    steps = record.get("steps")
    return steps if isinstance(steps, int) else 0


def can_resume(directory: Path) -> bool:
    """True if the run in a directory did not finish and left checkpoints."""
    return read_record(directory).get("status") != "finished" and bool(list_checkpoints(directory))


def describe_outcome(directory: Path) -> str:
    """Describe how the run in a directory ended: `"failed after 20 steps, 2 checkpoints, the newest of step 20"`."""
    record, checkpoints = read_record(directory), list_checkpoints(directory)
    status = record.get("status", "how it ended is not known")
    words = "killed" if status == "running" else str(status)
    if "steps" in record:
        words += f" after {count(count_steps(record), 'step')}"
    if checkpoints:
        words += f", {count(len(checkpoints), 'checkpoint')}, the newest of step {checkpoints[0][0]}"
    return words
