"""Options of the training engine. This module is light to import, because `plan` checks options without the engine."""

from __future__ import annotations

from enginehouse.engines.options import TrainOptions


class AcmeTrainOptions(TrainOptions):
    """Options of the `acme_train` training engine: the options of all training engines, and the fields that you add.

    `native` goes to the engine unchanged. Override `check` and `check_model` to reject options that cannot work.
    """
