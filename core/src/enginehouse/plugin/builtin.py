"""Core's own plugins. They declare what core brings through the same hooks as anybody's; there is no other way in."""

from __future__ import annotations

BUILTIN: tuple[str, ...] = (
    "enginehouse.weights.transports.plugin",
    "enginehouse.controller.plugin",
    "enginehouse_rl.plugin",
    "enginehouse_rl.runs.plugin",
)
"""Modules, in the order they are registered. Their names are reserved: no other plugin may declare one of them."""
