"""Plugins of enginehouse itself: they declare what they bring by the same hooks as anybody's."""

from __future__ import annotations

BUILTIN: tuple[str, ...] = (
    "enginehouse.weights.transports.plugin",
    "enginehouse.controller.plugin",
)
"""Modules of core, in the order they are registered. What they declare is reserved: no other plugin may declare it."""

STOREYS = ("enginehouse-recipes", "enginehouse-rewards", "enginehouse-rl", "enginehouse-transports")
"""Distributions of enginehouse that stand on core: where one is installed, its plugin counts as core's own do."""
