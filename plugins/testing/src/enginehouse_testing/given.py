"""What an author says of what is tried, beside its record: the arguments of a config, and data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

NAMED_BY_MODULE = ("loss", "advantage", "reward", "tracker", "environment")
"""Kinds of which a config may name its own, as `"module:attribute"`."""
KINDS = ("train", "rollout", "transport", *NAMED_BY_MODULE)
"""Kinds that have a suite."""

Read = Callable[[Path], Mapping[str, Sequence[tuple[int, float]]]]
ColumnOf = Literal["row", "token"]


@dataclass(frozen=True, slots=True)
class Given:
    """What functions, trackers and environments are tried with.

    Attributes:
        arguments: as a config would give them, by name.
        columns: columns of random float32 numbers that a loss or an advantage reads beside those of every run, each
            with one number a `"row"` or a `"token"`.
        examples: rows of data as a file of prompts has them, for a reward or an environment. A reward's have a
            `response`, too, and may have a `reward`: what it is to be. Empty: made-up ones.
        repeatable: whether a reward gives the same for the same; False for one that asks a model, say.
        seconds: longest a reward may take for a row.
        replies: what the scripted policy says that an environment is played by, as text.
        read: reads back what a tracker wrote, `read(directory) -> {name: [(step, value), ...]}`.
    """

    arguments: Mapping[str, Any] = field(default_factory=dict)
    columns: Mapping[str, ColumnOf] = field(default_factory=dict)
    examples: Sequence[Mapping[str, Any]] = ()
    repeatable: bool = True
    seconds: float = 10.0
    replies: Sequence[str] = ()
    read: Read | None = None
