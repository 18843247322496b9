"""The checks of enginehouse for acme-train."""

from enginehouse_testing import TrainEngineSuite


class TestAcmeTrain(TrainEngineSuite):
    backend = "acme_train"
