"""Runs enginehouse's conformance suite on acme-rollout."""

from enginehouse_testing import RolloutEngineSuite


class TestAcmeRollout(RolloutEngineSuite):
    backend = "acme_rollout"
