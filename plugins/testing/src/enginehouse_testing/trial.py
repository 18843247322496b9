"""The base of the trials with which acts try a function, a tracker or an environment."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from enginehouse_testing.given import Given


@dataclass(frozen=True, slots=True)
class Trial:
    """Gives an act the part under test.

    Attributes:
        record: the record under test.
        given: the arguments and the data for it.
        directory: folder that is empty when a case's first act begins, and removed after its last act.
    """

    record: Any
    given: Given
    directory: Path
