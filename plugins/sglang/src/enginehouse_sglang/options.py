"""Options of the `sglang` backend. Light to import: configs are checked before any engine is imported."""

from __future__ import annotations

from enginehouse.engines.options import RolloutOptions


class SGLangOptions(RolloutOptions):
    """Options of the `sglang` rollout engine; its own follow with the engine."""
