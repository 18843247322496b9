"""What enginehouse asks of acme-train."""

from enginehouse_testing import TrainEngineSuite


class TestAcmeTrain(TrainEngineSuite):
    backend = "acme_train"
