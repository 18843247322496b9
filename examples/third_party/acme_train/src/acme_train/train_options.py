"""Options of the training engine. This module imports little, because a config is checked without the engine."""

from __future__ import annotations

from enginehouse.engines.options import TrainOptions


class AcmeTrainOptions(TrainOptions):
    """Options of the `acme_train` training engine: the options of all training engines, and further typed fields.

    `native` is passed to the engine unchanged. Override `check` and `check_model` to reject options that cannot work.
    """
