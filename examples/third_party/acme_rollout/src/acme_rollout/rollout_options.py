"""Options of the rollout engine. This module is light to import, because `plan` checks options without the engine."""

from __future__ import annotations

from enginehouse.engines.options import RolloutOptions


class AcmeRolloutOptions(RolloutOptions):
    """Options of the `acme_rollout` rollout engine: the options of all rollout engines, and the fields that you add.

    `native` goes to the engine unchanged. Override `check` and `check_model` to reject options that cannot work.
    """
