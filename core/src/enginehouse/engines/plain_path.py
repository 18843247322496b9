"""Paths of model directories that every runtime reads as plain paths, not as a pattern, a URL or a list."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

PLAIN = re.compile(r"[A-Za-z0-9_./@+=,~ -]*")


class PlainPath:
    """A path by which a runtime can read a directory. It is the directory's own path if that has only characters of
    `PLAIN`, else the path of a link to the directory.

    Attributes:
        path: the path to pass on. It is valid until `close`.
    """

    def __init__(self, directory: str):
        self.path = directory
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        if not PLAIN.fullmatch(directory):
            places = (place for place in (tempfile.gettempdir(), "/tmp", "/var/tmp") if PLAIN.fullmatch(place))
            self._folder = tempfile.TemporaryDirectory(prefix="enginehouse-model-", dir=next(places))
            link = Path(self._folder.name, "model")
            link.symlink_to(Path(directory).absolute(), target_is_directory=True)
            self.path = str(link)

    def close(self) -> None:
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None
