"""The checks of losses."""

from __future__ import annotations

from enginehouse_testing.checks.loss import gradient, parts

CHECKS = (*parts.CHECKS, *gradient.CHECKS)
