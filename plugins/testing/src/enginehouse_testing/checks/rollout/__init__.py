"""The checks of rollout engines.

Checks that many others depend on come first. Checks of one model stand together, since an engine is launched for each
model, and those that leave no engine behind come last.
"""

from __future__ import annotations

from enginehouse_testing.checks.rollout import colocation, control, drawing, endings, life, updates

CHECKS = (
    *control.FIRST,
    *drawing.CHECKS,
    *endings.CHECKS,
    *control.CHECKS,
    *updates.CHECKS,
    *life.CHECKS,
    *updates.OTHER_MODELS,
    *life.LAST,
    *colocation.CHECKS,
)
