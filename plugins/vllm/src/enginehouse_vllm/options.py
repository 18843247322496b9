"""Options of the `vllm` backend. Light to import: configs are checked before any engine is imported."""

from __future__ import annotations

from enginehouse.engines.options import RolloutOptions


class VLLMOptions(RolloutOptions):
    """Options of the `vllm` rollout engine; its own follow with the engine."""
