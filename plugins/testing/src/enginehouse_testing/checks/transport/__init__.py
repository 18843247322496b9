"""All checks of weight transports, in the order they are run and reported."""

from __future__ import annotations

from enginehouse_testing.check import Check
from enginehouse_testing.checks.transport import exactness, failures, reach

CHECKS: tuple[Check, ...] = (*exactness.CHECKS, *failures.CHECKS, *reach.CHECKS)
