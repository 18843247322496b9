"""The plugins of enginehouse itself. They use the same hooks as any other plugin."""

from __future__ import annotations

BUILTIN: tuple[str, ...] = (
    "enginehouse.weights.transports.plugin",
    "enginehouse.controller.plugin",
)
"""Modules of core in order of registration. No other plugin may declare the names of their records."""

STOREYS = ("enginehouse-recipes", "enginehouse-rewards", "enginehouse-rl", "enginehouse-transports")
"""Distributions of enginehouse built on core. The plugin of an installed one counts as core's own."""
