"""Options of the `fsdp` backend. Light to import: configs are checked before any engine is imported."""

from __future__ import annotations

from enginehouse.engines.options import TrainOptions


class FSDPOptions(TrainOptions):
    """Options of the `fsdp` training engine; its own follow with the engine."""
