"""Names of models and data sets on the Hugging Face hub, which may stand in a config where a path may.

A path that exists is always the path. Nothing is asked of the hub here.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Literal, NamedTuple

from enginehouse_rl.data.files import SUFFIXES

Kind = Literal["model", "dataset"]

MAIN = "main"
"""The revision of a name without one."""
GGUF = ".gguf"
"""The suffix of a file of GGUF."""

_COMMIT = re.compile(r"[0-9a-f]{40}")
_REPOSITORY = r"(?P<repository>[A-Za-z0-9][\w.-]*/[\w.-]+)(?:@(?P<revision>[\w./-]+))?"
_MODEL = re.compile(_REPOSITORY + r"(?::(?P<file>[^:@]+))?", re.ASCII)
_DATASET = re.compile(_REPOSITORY + r"(?::(?:(?P<config>[^/:@]+)/)?(?P<split>[^/@]+))?", re.ASCII)


class HubName(NamedTuple):
    """A name on the hub: `Qwen/Qwen3-0.6B@revision`, a file of GGUF `org/name@revision:FILE.gguf`, or of a data set
    `openai/gsm8k@revision:config/split`.

    Attributes:
        kind: the kind of thing that it names.
        repository: `org/name`.
        revision: a branch, a tag or a commit; None where the name has none.
        config: the configuration of a data set; None where the name has none.
        split: its split; None where the name has none.
        file: the file of a model's weights in GGUF; None where the name has none.
    """

    kind: Kind
    repository: str
    revision: str | None = None
    config: str | None = None
    split: str | None = None
    file: str | None = None

    @classmethod
    def parse(cls, text: str, kind: Kind) -> HubName | None:
        """Return the name that a config has in the place of a path; None if it is a path.

        A directory that is here is no owner on the hub, unless a revision or a split says so.
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
        """True if the revision is a commit, which never moves."""
        return bool(self.revision and _COMMIT.fullmatch(self.revision))

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        config = f"{self.config}/" if self.config else ""
        part = self.file or (f"{config}{self.split}" if self.split else "")
        return f"{self.repository}{revision}{f':{part}' if part else ''}"
