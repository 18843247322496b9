"""Files of one JSON object a line, whole lines only."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


class JsonLines:
    """Appends objects to a file; each is in the operating system's hands when `append` returns."""

    def __init__(self, path: Path):
        self.path = path
        self._file = path.open("a", encoding="utf-8")

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one object as one line. Numbers that are not finite become null, which JSON lacks a word for."""
        self._file.write(encoded(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()


def encoded(row: Mapping[str, Any]) -> str:
    """One object as one line of strict JSON."""
    try:
        return json.dumps(row, allow_nan=False, ensure_ascii=False, default=_plain)
    except ValueError:
        return json.dumps(_finite(row), allow_nan=False, ensure_ascii=False)


def write_json_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a file of rows."""
    path.write_text("".join(encoded(row) + "\n" for row in rows), encoding="utf-8")


def read_whole_lines(path: Path) -> list[dict[str, Any]]:
    """The rows of a file, but for a last line that was cut off; none if there is no file."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _plain(value: Any) -> Any:
    """Numbers of numpy and torch as Python's own; anything else as its text."""
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "ndim", 0) == 0:
        return item()
    to_list = getattr(value, "tolist", None)
    return to_list() if callable(to_list) else str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, (str, int, type(None))) else _finite(_plain(value))
