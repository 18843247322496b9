"""Files that `enginehouse init` writes."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from importlib.util import cache_from_source
from pathlib import Path

from enginehouse.errors import ConfigError


@dataclass
class NewFiles:
    """Files that this command writes: none that was there is touched, and all are taken back if it fails.

    Attributes:
        directory: where.
        made: their names.
    """

    directory: Path
    made: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._new = not self.directory.exists()

    def check(self, *names: str) -> None:
        """Refuse names that are taken.

        Raises:
            ConfigError: naming the file.
        """
        for name in names:
            if os.path.lexists(path := self.directory / name) and name not in self.made:
                raise ConfigError(f"{path} is there already, and nothing is overwritten: name another directory")

    def write(self, name: str, text: str) -> str:
        """Write a file; returns its name."""
        self.check(name)
        self.directory.mkdir(parents=True, exist_ok=True)
        self.made = [*dict.fromkeys([*self.made, name])]  # before: half a file is taken back too
        (self.directory / name).write_text(text, encoding="utf-8")
        return name

    def take_back(self) -> None:
        """Delete what was written and what Python compiled of it, and the directory if it was made for it."""
        for path in [self.directory / name for name in self.made]:
            path.unlink(missing_ok=True)
            if path.suffix == ".py":
                compiled = Path(cache_from_source(path))
                compiled.unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # others' modules are there too, or none was compiled
                    compiled.parent.rmdir()
        if self._new:
            with contextlib.suppress(OSError):  # a model was made there, which took a while: it stays
                self.directory.rmdir()
        self.made = []
