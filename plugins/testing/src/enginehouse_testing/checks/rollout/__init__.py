"""All checks of rollout engines, in the order they are run and reported.

What many of them take comes first. Those of one model stand together, since an engine is launched for each, and those
that leave none behind come last.
"""

from __future__ import annotations

from enginehouse_testing.check import Check
from enginehouse_testing.checks.rollout import colocation, control, drawing, endings, life, updates

CHECKS: tuple[Check, ...] = (
    control.OVERTAKING,
    *drawing.CHECKS,
    *endings.CHECKS,
    *control.CHECKS,
    *updates.CHECKS,
    life.SLEEP,
    life.ENDPOINT,
    life.SHUTDOWN,
    updates.EXPERTS,
    updates.UNTIED,
    life.KILLED,
    life.UNLOADABLE,
    colocation.COLOCATES,
)
