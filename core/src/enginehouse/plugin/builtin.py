"""The plugins of enginehouse itself. They use the same hooks as any other plugin."""

from __future__ import annotations

BUILTIN: tuple[str, ...] = (
    "enginehouse.weights.transports.plugin",
    "enginehouse.controller.plugin",
)
"""Plugin modules of core in order of registration. No other plugin may declare a record with the name of one of
theirs."""

STOREYS = ("enginehouse-recipes", "enginehouse-rewards", "enginehouse-rl", "enginehouse-transports")
"""Distributions of enginehouse that are built on core. If installed, their plugins count as core's own."""
