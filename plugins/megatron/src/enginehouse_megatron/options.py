"""Options of the `megatron` backend. Light to import: configs are checked before any engine is imported."""

from __future__ import annotations

from enginehouse.engines.options import TrainOptions


class MegatronOptions(TrainOptions):
    """Options of the `megatron` training engine; its own follow with the engine."""
