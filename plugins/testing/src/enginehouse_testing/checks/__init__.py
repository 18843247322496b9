"""All checks, by kind of record."""

from __future__ import annotations

from collections.abc import Sequence

from enginehouse.plugin import resolve
from enginehouse_testing.check import Check


def checks_of(kind: str) -> Sequence[Check]:
    """Return the checks of a kind of record (`"train"`, `"rollout"`, `"transport"`), in the order in which they run.

    Only the modules of this kind are imported. Acts also run in Python environments without the packages that the
    modules of other kinds import.
    """
    checks: Sequence[Check] = resolve(f"enginehouse_testing.checks.{kind}:CHECKS")
    return checks
