"""The plugins of enginehouse itself. They use the same hooks as any other plugin."""

from __future__ import annotations

BUILTIN: tuple[str, ...] = (
    "enginehouse.weights.transports.plugin",
    "enginehouse.controller.plugin",
)
"""Plugin modules of core in order of registration. The name of a record of these modules is reserved: no other plugin
may declare a record with this name."""

STOREYS = ("enginehouse-recipes", "enginehouse-rewards", "enginehouse-rl", "enginehouse-transports")
"""Distributions of enginehouse that are built on core. If installed, their plugins count as core's own."""
