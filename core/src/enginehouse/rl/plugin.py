"""The built-in algorithms' parts, and core's own way to run a step."""

from __future__ import annotations

from enginehouse.plugin import Advantage, Filter, Loss, Reward, hookimpl

POLICY_LOSSES = {
    "cispo": "Policy gradient weighted by a clipped ratio (MiniMax 2025)",
    "clipped_policy": "Clipped policy gradient (Schulman et al. 2017), symmetric or not",
    "gspo": "Clipped policy gradient by the ratio of whole sequences (Zheng et al. 2025)",
    "policy_gradient": "Policy gradient without a ratio (Williams 1992)",
    "sapo": "Policy gradient through a gate that closes softly (Gao et al. 2025)",
}
"""What is made by `enginehouse.rl.losses.policy`, each in a file of its name."""


@hookimpl
def enginehouse_register_advantages(register):
    register(
        Advantage(
            name="distillation",
            summary="How much likelier a teacher finds each token (Lu et al. 2025)",
            function="enginehouse.rl.advantages.distillation:distillation",
            needs=("rollout_logprobs", "reference_logprobs", "loss_mask"),
        )
    )
    register(
        Advantage(
            name="gae",
            summary="Discounted errors of a critic's values (Schulman et al. 2016)",
            function="enginehouse.rl.advantages.gae:gae",
            needs=("reward", "token_rewards", "values", "loss_mask"),
        )
    )
    register(
        Advantage(
            name="gdpo",
            summary="Each of several rewards against its group, then all samples (Liu et al. 2026)",
            function="enginehouse.rl.advantages.gdpo:gdpo",
            compares_samples=True,
            needs=("rewards", "group"),
        )
    )
    register(
        Advantage(
            name="gpg",
            summary="Reward against the mean of its group, by how many groups tell (Chu et al. 2025)",
            function="enginehouse.rl.advantages.gpg:gpg",
            compares_samples=True,
            needs=("reward", "group"),
        )
    )
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
            name="opo",
            summary="Reward against the mean of its group, weighted by length (Hao et al. 2025)",
            function="enginehouse.rl.advantages.opo:opo",
            compares_samples=True,
            needs=("reward", "group", "response_tokens"),
        )
    )
    register(
        Advantage(
            name="process_rewards",
            summary="Rewards of the steps from a token on, against its group's (Shao et al. 2024)",
            function="enginehouse.rl.advantages.process_rewards:process_rewards",
            compares_samples=True,
            needs=("reward", "token_rewards", "group", "loss_mask"),
        )
    )
    register(
        Advantage(
            name="reinforce_plus_plus",
            summary="Discounted rewards from a token on, against all tokens (Hu et al. 2025)",
            function="enginehouse.rl.advantages.reinforce_plus_plus:reinforce_plus_plus",
            needs=("reward", "token_rewards", "loss_mask"),
        )
    )
    register(
        Advantage(
            name="reinforce_plus_plus_baseline",
            summary="Reward against the mean of its group, over all tokens' deviation (Hu et al. 2025)",
            function="enginehouse.rl.advantages.reinforce_plus_plus_baseline:reinforce_plus_plus_baseline",
            compares_samples=True,
            needs=("reward", "group", "loss_mask"),
        )
    )
    register(
        Advantage(
            name="remax",
            summary="Rewards from a token on, against that of the prompt's greedy response (Li et al. 2023)",
            function="enginehouse.rl.advantages.remax:remax",
            needs=("reward", "token_rewards", "baseline", "loss_mask"),
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
    for name, summary in POLICY_LOSSES.items():
        register(
            Loss(
                name=name,
                summary=summary,
                function=f"enginehouse.rl.losses.{name}:{name}",
                needs_actor_logprobs=("importance_cap",),
                taken_from={"max_tokens": "rollout.sampling.max_tokens"},
            )
        )
    register(
        Loss(
            name="clipped_value",
            summary="A critic's squared error, clipped around its old values (Schulman et al. 2017)",
            function="enginehouse.rl.losses.clipped_value:clipped_value",
            output="values",
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
            output="values",
        )
    )


@hookimpl
def enginehouse_register_rewards(register):
    for name, summary in {
        "code": "Runs the response's program against tests, in a sandbox",
        "exact_match": "1 where the response is the answer, else 0",
        "format": "1 where the response matches a regular expression, else 0",
        "length": "0 to -1 for a response that is too long (Yu et al. 2025), or not of a length that is wanted",
        "math": "1 where the response's answer, in LaTeX or plain, equals the data's, by math-verify",
        "numeric": "1 where the response's number is the answer's, as for GSM8K, else 0",
        "served": "The score of a reward model that is served by vLLM or SGLang",
    }.items():
        register(Reward(name=name, summary=summary, function=f"enginehouse.rl.rewards.builtin.{name}:{name}"))


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
