"""Runs enginehouse's conformance suite on acme-train."""

from enginehouse_testing import TrainEngineSuite


class TestAcmeTrain(TrainEngineSuite):
    backend = "acme_train"
