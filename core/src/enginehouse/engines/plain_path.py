"""A model's directory under a path that every runtime reads as a path, and none as a pattern, a URL or a list."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

PLAIN = re.compile(r"[A-Za-z0-9_./@+=,~ -]*")


class PlainPath:
    """A directory as a runtime is told it: its own path, or a link to it where that has other characters than `PLAIN`.

    Attributes:
        path: what the runtime is told; it leads there until `close`.
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
        """Take the link away."""
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None
