"""Writes and reads files with one JSON object per line. Incomplete lines are never written or returned."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from enginehouse.atomic import write_whole
from enginehouse.jsontext import decode_json

log = logging.getLogger(__name__)


class JsonLines:
    """Appends objects to a file. When `append` returns, the operating system has the line."""

    def __init__(self, path: Path):
        self.path = path
        self._file = path.open("a+b", buffering=0)

    @property
    def in_place(self) -> bool:
        """True if the path still leads to the open file, or if the file is closed."""
        try:
            return self._file.closed or os.path.samestat(os.stat(self.path), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False

    def put_back(self) -> None:
        """Write all rows to a new file at the path, and append to that file from now on."""
        self._file.seek(0)
        content = self._file.read()
        self._file.close()
        self.path.write_bytes(content)
        self._file = self.path.open("a+b", buffering=0)

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one object as one line. Numbers that are not finite become null, because JSON cannot express them.

        Raises:
            OSError: The line could not be written; the file is unchanged.
        """
        line = (encode_row(row) + "\n").encode("utf-8", "backslashreplace")  # JSON's own escape
        size = os.fstat(self._file.fileno()).st_size
        try:
            while line:  # in one piece, unless the disk is full
                line = line[self._file.write(line) :]
        except OSError:
            self._file.truncate(size)
            raise

    def to_disk(self) -> None:
        """Wait until all rows are on disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def encode_row(row: Mapping[str, Any]) -> str:
    """Return an object as one line of strict JSON."""
    try:
        return json.dumps(row, allow_nan=False, ensure_ascii=False, default=_simplify)
    except ValueError:
        return json.dumps(replace_infinite(row), allow_nan=False, ensure_ascii=False)


def write_json_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Replace the file at `path` atomically by a file of these rows."""
    write_whole(path, (encode_row(row) + "\n" for row in rows))


def read_whole_lines(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file, without an incomplete last line; none if there is no file.

    A line that is no JSON object is left out, with a warning that names the line.
    """
    return read_lines_from(path, 0)[0] if path.exists() else []


def read_lines_from(path: Path, begin: int) -> tuple[list[dict[str, Any]], int]:
    """Read a growing file from byte `begin` on, as `read_whole_lines` does.

    Returns:
        The rows, and the position in the file, in bytes, at which they end and the next call should begin.

    Raises:
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        file.seek(begin)
        *lines, partial = file.read().split(b"\n")
        end = file.tell() - len(partial)
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = decode_json(line)
        except ValueError:
            row = None
        if isinstance(row, dict):
            rows.append(row)
        else:
            place = f" after byte {begin}" if begin else ""
            log.warning("%s, line %d%s is damaged and left out: %s", path, number, place, _shorten(line))
    return rows, end


def _shorten(line: bytes) -> str:
    return repr(line[:40].decode("utf-8", "replace")) + ("..." if len(line) > 40 else "")


def _simplify(value: Any) -> Any:
    """Return a number or an array of numpy or torch as Python's own type, and anything else as text."""
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "ndim", 0) == 0:
        return item()
    to_list = getattr(value, "tolist", None)
    return to_list() if callable(to_list) else str(value)


def replace_infinite(value: Any) -> Any:
    """Return plain data in which None replaces every float that JSON cannot express."""
    if isinstance(value, Mapping):
        return {str(key): replace_infinite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [replace_infinite(inner) for inner in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, (str, int, type(None))) else replace_infinite(_simplify(value))
