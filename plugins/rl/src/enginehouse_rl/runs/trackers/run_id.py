"""Stores in the run directory the id that a tracker's service gave to the run, so that a resumed run finds it."""

from __future__ import annotations

from pathlib import Path

from enginehouse.atomic import write_whole

FILE = "run_id"


def read_run_id(folder: Path) -> str | None:
    """Return the id in a tracker's folder of the run directory; None if there is none yet."""
    try:
        return (folder / FILE).read_text(encoding="utf-8").strip() or None
    except FileNotFoundError:
        return None


def keep_run_id(folder: Path, run_id: str) -> None:
    """Write an id to a tracker's folder, which is created if needed."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / FILE, run_id + "\n")
