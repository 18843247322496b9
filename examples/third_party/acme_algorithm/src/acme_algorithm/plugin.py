"""The records that this package adds to enginehouse. Every command imports this module, so it names code by strings."""

from __future__ import annotations

from enginehouse.plugin import Advantage, Environment, Loss, Tracker, hookimpl

enginehouse_protocol = "1.1"
"""The contract version that this plugin is written for."""


@hookimpl
def enginehouse_register_losses(register):
    register(
        Loss(
            name="acme_algorithm",
            summary="Policy gradient with a capped importance ratio, which has no gradient",
            function="acme_algorithm.loss:acme_algorithm_loss",
        )
    )


@hookimpl
def enginehouse_register_advantages(register):
    register(
        Advantage(
            name="acme_algorithm",
            summary="Reward minus the median of its group",
            function="acme_algorithm.advantage:acme_algorithm_advantage",
            compares_samples=True,  # plan requires at least two samples of a prompt
            needs=("reward", "group"),  # the columns that it gets
        )
    )


@hookimpl
def enginehouse_register_environments(register):
    register(
        Environment(
            name="acme_algorithm",
            summary="A further try after an answer with reward 0",
            environment="acme_algorithm.environment:AcmeAlgorithmEnvironment",
        )
    )


@hookimpl
def enginehouse_register_trackers(register):
    register(
        Tracker(
            name="acme_algorithm",
            summary="Metrics as CSV files in the run directory",
            tracker="acme_algorithm.tracker:AcmeAlgorithmTracker",
        )
    )
