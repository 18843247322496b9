"""What enginehouse asks of acme-algorithm."""

from enginehouse_testing import AdvantageSuite, LossSuite, TrackerSuite


class TestAcmeAlgorithmAdvantage(AdvantageSuite):
    advantage = "acme_algorithm"


class TestAcmeAlgorithmLoss(LossSuite):
    loss = "acme_algorithm"


class TestAcmeAlgorithmTracker(TrackerSuite):
    tracker = "acme_algorithm"
