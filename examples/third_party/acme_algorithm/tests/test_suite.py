"""The checks of enginehouse for acme-algorithm."""

from enginehouse_testing import AdvantageSuite, EnvironmentSuite, LossSuite, TrackerSuite


class TestAcmeAlgorithmAdvantage(AdvantageSuite):
    advantage = "acme_algorithm"


class TestAcmeAlgorithmLoss(LossSuite):
    loss = "acme_algorithm"


class TestAcmeAlgorithmTracker(TrackerSuite):
    tracker = "acme_algorithm"


class TestAcmeAlgorithmEnvironment(EnvironmentSuite):
    environment = "acme_algorithm"
