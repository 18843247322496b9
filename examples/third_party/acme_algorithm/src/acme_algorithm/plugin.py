"""What this package adds to enginehouse. Every command imports it: code is named by strings, and not imported."""

from __future__ import annotations

from enginehouse.plugin import Advantage, Environment, Loss, Tracker, hookimpl

enginehouse_protocol = "1.1"
"""The plugin contract that this is written for."""


@hookimpl
def enginehouse_register_losses(register):
    register(
        Loss(
            name="acme_algorithm",
            summary="Policy gradient with an importance ratio that is cut, and has no gradient itself",
            function="acme_algorithm.loss:acme_algorithm_loss",
        )
    )


@hookimpl
def enginehouse_register_advantages(register):
    register(
        Advantage(
            name="acme_algorithm",
            summary="Reward against its group's median",
            function="acme_algorithm.advantage:acme_algorithm_advantage",
            compares_samples=True,  # plan asks for two samples of a prompt or more
            needs=("reward", "group"),  # the columns that it is given
        )
    )


@hookimpl
def enginehouse_register_environments(register):
    register(
        Environment(
            name="acme_algorithm",
            summary="A further try where an answer earns nothing",
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
