"""The checks of rollout engines.

Checks on which many others depend come first. Checks that use the same model follow each other, because each change of
the model needs a launch. Checks that leave no engine behind come last.
"""

from __future__ import annotations

from enginehouse_testing.checks.rollout import adapters, colocation, control, drawing, endings, life, updates

CHECKS = (
    *control.FIRST,
    *drawing.CHECKS,
    *endings.CHECKS,
    *control.CHECKS,
    *updates.CHECKS,
    *life.CHECKS,
    *updates.OTHER_MODELS,
    *adapters.CHECKS,
    *life.LAST,
    *colocation.CHECKS,
)
