"""The checks of enginehouse for acme-rollout."""

from enginehouse_testing import RolloutEngineSuite


class TestAcmeRollout(RolloutEngineSuite):
    backend = "acme_rollout"
