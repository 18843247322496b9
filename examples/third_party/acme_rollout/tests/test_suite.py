"""What enginehouse asks of acme-rollout."""

from enginehouse_testing import RolloutEngineSuite


class TestAcmeRollout(RolloutEngineSuite):
    backend = "acme_rollout"
