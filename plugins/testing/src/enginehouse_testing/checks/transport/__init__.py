"""The checks of weight transports."""

from __future__ import annotations

from enginehouse_testing.checks.transport import exactness, failures, reach

CHECKS = (*exactness.CHECKS, *failures.CHECKS, *reach.CHECKS)
