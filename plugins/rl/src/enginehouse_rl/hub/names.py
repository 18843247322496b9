"""Names of models and data sets on the Hugging Face hub, which a config may have instead of paths.

A path that exists is always taken as a path. This module sends no requests to the hub.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Literal, NamedTuple

from enginehouse_rl.data.files import SUFFIXES

Kind = Literal["model", "dataset"]

MAIN = "main"
"""The revision of a name without a revision."""
GGUF = ".gguf"
"""The suffix of GGUF files."""

_COMMIT = re.compile(r"[0-9a-f]{40}")
_REPOSITORY = r"(?P<repository>[A-Za-z0-9][\w.-]*/[\w.-]+)(?:@(?P<revision>[\w./-]+))?"
_MODEL = re.compile(_REPOSITORY + r"(?::(?P<file>[^:@]+))?", re.ASCII)
_DATASET = re.compile(_REPOSITORY + r"(?::(?:(?P<config>[^/:@]+)/)?(?P<split>[^/@]+))?", re.ASCII)


class HubName(NamedTuple):
    """A name on the hub.

    Examples are `Qwen/Qwen3-0.6B@revision`, for a GGUF file `org/name@revision:FILE.gguf`, and for a data set
    `openai/gsm8k@revision:config/split`.

    Attributes:
        repository: `org/name`.
        config: the configuration of a data set, if the name has one.
        split: the split of a data set, if the name has one.
        file: the GGUF file with a model's weights, if the name has one.
    """

    kind: Kind
    repository: str
    revision: str | None = None
    config: str | None = None
    split: str | None = None
    file: str | None = None

    @classmethod
    def parse(cls, text: str, kind: Kind) -> HubName | None:
        """Return the hub name that stands in a config instead of a path; None if the text is a path.

        If the part before the slash is a local directory, the text is a path, unless it has a revision, a split or a
        file.
        """
        match = (_MODEL if kind == "model" else _DATASET).fullmatch(text)
        if match is None or os.path.lexists(text):
            return None
        name = cls(kind, **match.groupdict())
        plain = name.revision is None and name.split is None and name.file is None
        if plain and Path(name.repository).parent.is_dir():
            return None
        suffixes = SUFFIXES if kind == "dataset" else (GGUF,)
        return None if plain and text.lower().endswith(suffixes) else name

    @property
    def names_commit(self) -> bool:
        """True if the revision is a commit, which never changes."""
        return bool(self.revision and _COMMIT.fullmatch(self.revision))

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        config = f"{self.config}/" if self.config else ""
        part = self.file or (f"{config}{self.split}" if self.split else "")
        return f"{self.repository}{revision}{f':{part}' if part else ''}"
