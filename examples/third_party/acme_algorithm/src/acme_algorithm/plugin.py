"""Registers the parts of this package. Every command imports this module, so it names code by strings."""

from __future__ import annotations

from enginehouse.plugin import Advantage, Environment, Loss, Tracker, hookimpl

enginehouse_protocol = "1.1"
"""The plugin contract that this is written for."""


@hookimpl
def enginehouse_register_losses(register):
    register(
        Loss(
            name="acme_algorithm",
            summary="Policy gradient, weighted by an importance ratio that is cut and detached",
            function="acme_algorithm.loss:acme_algorithm_loss",
        )
    )


@hookimpl
def enginehouse_register_advantages(register):
    register(
        Advantage(
            name="acme_algorithm",
            summary="Reward minus the median reward of its group",
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
            summary="Further tries after an answer with a reward of 0 or less",
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
