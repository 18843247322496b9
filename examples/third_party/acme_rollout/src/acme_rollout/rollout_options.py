"""Options of the rollout engine. This module imports little, because a config is checked without the engine."""

from __future__ import annotations

from enginehouse.engines.options import RolloutOptions


class AcmeRolloutOptions(RolloutOptions):
    """Options of the `acme_rollout` rollout engine: the options of all rollout engines, and further typed fields.

    `native` is passed to the engine unchanged. Override `check` and `check_model` to reject options that cannot work.
    """
