"""What a user may set of the training engine. Light to import: a config is checked before any engine is there."""

from __future__ import annotations

from enginehouse.engines.options import TrainOptions


class AcmeTrainOptions(TrainOptions):
    """Options of the `acme_train` training engine: those of all training engines, and its own as typed fields.

    `native` is what goes to the engine unchanged. `check` and `check_model` may refuse what cannot go well.
    """
