"""All checks of losses, in the order they are run and reported."""

from __future__ import annotations

from enginehouse_testing.check import Check
from enginehouse_testing.checks.loss import gradient, parts

CHECKS: tuple[Check, ...] = (*parts.CHECKS, *gradient.CHECKS)
