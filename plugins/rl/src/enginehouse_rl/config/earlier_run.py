"""Reads what an earlier run left in a run directory, where any file may be damaged."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from enginehouse.jsontext import decode_json
from enginehouse_rl.checkpoints import checkpoint_paths

RUN_MARKER = "run.json"
"""The file that tells a run directory from any other; only a directory that holds it is ever deleted."""


def read_record(directory: Path) -> Mapping[str, Any]:
    """Return the content of a run's `run.json`; empty where it is damaged or not there."""
    try:
        content = decode_json((directory / RUN_MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def steps_taken(record: Mapping[str, Any]) -> int:
    """Return the steps that a run ended, by its record; 0 where that does not say."""
    steps = record.get("steps")
    return steps if isinstance(steps, int) else 0


def can_go_on(directory: Path) -> bool:
    """Return whether the run in a directory did not finish, and left checkpoints to go on from."""
    return read_record(directory).get("status") != "finished" and bool(checkpoint_paths(directory))


def outcome(directory: Path) -> str:
    """Say how the run in a directory ended: `"failed after 20 steps, 2 checkpoints, the newest of step 20"`."""
    record, checkpoints = read_record(directory), checkpoint_paths(directory)
    status = record.get("status", "how it ended is not known")
    words = "killed" if status == "running" else str(status)
    if "steps" in record:
        words += f" after {_count(steps_taken(record), 'step')}"
    if checkpoints:
        words += f", {_count(len(checkpoints), 'checkpoint')}, the newest of step {checkpoints[0][0]}"
    return words


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
