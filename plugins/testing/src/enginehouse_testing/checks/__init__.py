"""All checks, by the kind of thing they are made for."""

from __future__ import annotations

from enginehouse.plugin import resolve
from enginehouse_testing.check import Check


def checks_of(kind: str) -> tuple[Check, ...]:
    """The checks of a kind of record (`"train"`, `"rollout"`, `"transport"`), in the order they are run and reported.

    A kind's are imported when they are asked for: its acts also run where not all can be imported.
    """
    found: tuple[Check, ...] = resolve(f"enginehouse_testing.checks.{kind}:CHECKS")
    return found
