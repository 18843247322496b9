from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from importlib.util import cache_from_source
from pathlib import Path

from enginehouse.errors import ConfigError


@dataclass
class NewFiles:
    """Writes the files of `enginehouse init`, never over existing files. Deletes them if the command fails."""

    directory: Path
    made: list[str] = field(default_factory=list)  # names

    def __post_init__(self) -> None:
        self._new = not self.directory.exists()

    def check(self, *names: str) -> None:
        """Raise `ConfigError` if a file with one of these names exists."""
        for name in names:
            if os.path.lexists(path := self.directory / name) and name not in self.made:
                raise ConfigError(f"{path} exists already, and nothing is overwritten: choose another directory")

    def write(self, name: str, text: str) -> str:
        self.check(name)
        self.directory.mkdir(parents=True, exist_ok=True)
        self.made = [*dict.fromkeys([*self.made, name])]  # before writing, so that half a file is deleted too
        (self.directory / name).write_text(text, encoding="utf-8")
        return name

    def take_back(self) -> None:
        """Delete the written files, Python's compiled copies, and the directory if it is new."""
        for path in [self.directory / name for name in self.made]:
            path.unlink(missing_ok=True)
            if path.suffix == ".py":
                compiled = Path(cache_from_source(path))
                compiled.unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # it has other modules, or does not exist
                    compiled.parent.rmdir()
        if self._new:
            with contextlib.suppress(OSError):  # a model was made there, which took a while and stays
                self.directory.rmdir()
        self.made = []
