"""Arguments and data that an author gives to a suite in addition to the record."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

NAMED_BY_MODULE = ("loss", "advantage", "reward", "tracker", "environment")
"""Kinds that a config may name as `"module:attribute"`."""
KINDS = ("train", "rollout", "transport", *NAMED_BY_MODULE)
"""Kinds of records that have a suite."""

Read = Callable[[Path], Mapping[str, Sequence[tuple[int, float]]]]
ColumnOf = Literal["row", "token"]


@dataclass(frozen=True, slots=True)
class Given:
    """Arguments and data to try functions, trackers and environments with.

    Attributes:
        arguments: arguments as in a config, by name.
        columns: additional columns that a loss or an advantage reads. They hold random float32 numbers, one for each
            `"row"` or `"token"`.
        examples: rows of data for a reward or an environment. Rows for a reward also have a `response`, and may have
            the expected `reward`. Empty: made-up rows.
        repeatable: True if a reward gives the same row the same score; False for example if it asks a model.
        seconds: maximum time in seconds that a reward may take for a row.
        replies: texts that the scripted policy answers an environment with.
        read: reads back what a tracker wrote, `read(directory) -> {name: [(step, value), ...]}`.
    """

    arguments: Mapping[str, Any] = field(default_factory=dict)
    columns: Mapping[str, ColumnOf] = field(default_factory=dict)
    examples: Sequence[Mapping[str, Any]] = ()
    repeatable: bool = True
    seconds: float = 10.0
    replies: Sequence[str] = ()
    read: Read | None = None
