"""The built-in algorithms' parts, and core's own way to run a step."""

from __future__ import annotations

from enginehouse.plugin import Advantage, Filter, Loss, Reward, hookimpl


@hookimpl
def enginehouse_register_advantages(register):
    register(
        Advantage(
            name="grpo",
            summary="Reward against the mean of its group, divided by the group's deviation (Shao et al. 2024)",
            function="enginehouse.rl.advantages.grpo:grpo",
            compares_samples=True,
            needs=("reward", "group"),
        )
    )
    register(
        Advantage(
            name="rloo",
            summary="Reward against the mean of the others of its group (Ahmadian et al. 2024)",
            function="enginehouse.rl.advantages.rloo:rloo",
            compares_samples=True,
            needs=("reward", "group"),
        )
    )


@hookimpl
def enginehouse_register_losses(register):
    register(
        Loss(
            name="clipped_policy",
            summary="Clipped policy gradient (Schulman et al. 2017), symmetric or not",
            function="enginehouse.rl.losses.clipped_policy:clipped_policy",
            needs_actor_logprobs=("importance_cap",),
            taken_from={"max_tokens": "rollout.sampling.max_tokens"},
        )
    )
    register(
        Loss(
            name="supervised",
            summary="Negative log-likelihood of the chosen tokens",
            function="enginehouse.rl.losses.supervised:supervised",
        )
    )
    register(
        Loss(
            name="weighted_logprob",
            summary="Logprobs weighted by a column: any policy gradient on any engine",
            function="enginehouse.rl.losses.weighted_logprob:weighted_logprob",
        )
    )
    register(
        Loss(
            name="weighted_value",
            summary="Values weighted by a column: any loss of values on any engine",
            function="enginehouse.rl.losses.weighted_value:weighted_value",
        )
    )


@hookimpl
def enginehouse_register_rewards(register):
    register(
        Reward(
            name="exact_match",
            summary="1 where the response is the answer, else 0",
            function="enginehouse.rl.rewards.exact_match:exact_match",
        )
    )


@hookimpl
def enginehouse_register_filters(register):
    register(
        Filter(
            name="mixed_rewards",
            summary="Groups whose rewards are not all equal: dynamic sampling (Yu et al. 2025)",
            function="enginehouse.rl.filters.mixed_rewards:mixed_rewards",
        )
    )


@hookimpl(trylast=True)
def enginehouse_run_step(run, step):
    return run.run_step(step)
