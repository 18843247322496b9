"""Files of one JSON object a line, whole lines only."""

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
    """Appends objects to a file; each is in the operating system's hands when `append` returns."""

    def __init__(self, path: Path):
        self.path = path
        self._file = path.open("a+b", buffering=0)

    @property
    def in_place(self) -> bool:
        """True if what is at the path is the file that is written, or was until it was closed."""
        try:
            return self._file.closed or os.path.samestat(os.stat(self.path), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False

    def put_back(self) -> None:
        """Write all that was appended to a file at the path once more, in place of what is there, and go on with it."""
        self._file.seek(0)
        written = self._file.read()
        self._file.close()
        self.path.write_bytes(written)
        self._file = self.path.open("a+b", buffering=0)

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one object as one line. Numbers that are not finite become null, which JSON lacks a word for.

        Raises:
            OSError: it could not be written; the file is as it was.
        """
        line = (encoded(row) + "\n").encode("utf-8", "backslashreplace")  # which is JSON's escape
        before = os.fstat(self._file.fileno()).st_size
        try:
            while line:  # in one piece, unless the disk is full
                line = line[self._file.write(line) :]
        except OSError:
            self._file.truncate(before)
            raise

    def to_disk(self) -> None:
        """Return when all that was appended is on disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()


def encoded(row: Mapping[str, Any]) -> str:
    """One object as one line of strict JSON."""
    try:
        return json.dumps(row, allow_nan=False, ensure_ascii=False, default=_plain)
    except ValueError:
        return json.dumps(finite(row), allow_nan=False, ensure_ascii=False)


def write_json_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Replace the file `path` by one of rows, as `write_whole`."""
    write_whole(path, (encoded(row) + "\n" for row in rows))


def read_whole_lines(path: Path) -> list[dict[str, Any]]:
    """The rows of a file, but for a last line that was cut off; none if there is no file.

    A line that holds no JSON object is left out, with a warning that names it.
    """
    return whole_lines_from(path, 0)[0] if path.exists() else []


def whole_lines_from(path: Path, begin: int) -> tuple[list[dict[str, Any]], int]:
    """As `read_whole_lines`, of a file that grows: the rows from a byte on, and the byte where later ones begin.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        file.seek(begin)
        *lines, rest = file.read().split(b"\n")
        end = file.tell() - len(rest)
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = decode_json(line)
        except ValueError:
            row = None
        if isinstance(row, dict):
            rows.append(row)
        else:
            where = f" after byte {begin}" if begin else ""
            log.warning("%s, line %d%s is damaged and left out: %s", path, number, where, _shown(line))
    return rows, end


def _shown(line: bytes) -> str:
    return repr(line[:40].decode("utf-8", "replace")) + ("..." if len(line) > 40 else "")


def _plain(value: Any) -> Any:
    """Numbers of numpy and torch as Python's own; anything else as its text."""
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "ndim", 0) == 0:
        return item()
    to_list = getattr(value, "tolist", None)
    return to_list() if callable(to_list) else str(value)


def finite(value: Any) -> Any:
    """Plain data with None for every float that JSON has no word for."""
    if isinstance(value, Mapping):
        return {str(key): finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, (str, int, type(None))) else finite(_plain(value))
