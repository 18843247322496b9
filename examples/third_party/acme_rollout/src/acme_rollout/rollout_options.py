"""What a user may set of the rollout engine. Light to import: a config is checked before any engine is there."""

from __future__ import annotations

from enginehouse.engines.options import RolloutOptions


class AcmeRolloutOptions(RolloutOptions):
    """Options of the `acme_rollout` rollout engine: those of all rollout engines, and its own as typed fields.

    `native` is what goes to the engine unchanged. `check` and `check_model` may refuse what cannot go well.
    """
