"""Registers the trainer as a plugin: commands, advantages, losses, filters, environments, trackers, and a step hook."""

from __future__ import annotations

from enginehouse.plugin import Advantage, Environment, Filter, Loss, Tracker, hookimpl

enginehouse_protocol = "1.1"

COMMANDS = {
    "train": ("train:train", "Train a model by reinforcement learning."),
    "sft": ("sft:sft", "Train a model on demonstrations."),
    "dpo": ("dpo:dpo", "Train a policy on preferences with DPO or KTO."),
    "rm": ("rm:rm", "Train a reward model on preferences."),
    "eval": ("evaluate:evaluate", "Evaluate a model on held-out prompts."),
    "plan": ("plan:plan", "Check a config, its data and its model without starting a run."),
    "keys": ("keys:keys", "List the config keys with types and defaults."),
}
"""For each command: its function, as a path below `enginehouse_rl.cli`, and its line in `--help`."""

ADVANTAGES = {
    "distillation": (
        "Logprob of each token under a teacher minus its logprob under the policy (Lu et al. 2025)",
        ("old_logprobs", "reference_logprobs", "loss_mask"),
    ),
    "gae": (
        "Discounted sum of a critic's temporal-difference errors (Schulman et al. 2016)",
        ("reward", "token_rewards", "values", "loss_mask"),
    ),
    "gdpo": (
        "Each of several rewards normalized in its group, then their sum over all samples (Liu et al. 2026)",
        ("rewards", "group"),
    ),
    "gpg": (
        "Reward minus the mean of its group, larger if the rewards of many groups are equal (Chu et al. 2025)",
        ("reward", "kl_penalty", "group"),
    ),
    "grpo": (
        "Reward minus the mean of its group, divided by the group's standard deviation (Shao et al. 2024)",
        ("reward", "kl_penalty", "group"),
    ),
    "opo": (
        "Reward minus the mean of its group weighted by length (Hao et al. 2025)",
        ("reward", "group", "response_tokens"),
    ),
    "process_rewards": (
        "Rewards of the steps that end at a token or later, normalized in its group (Shao et al. 2024)",
        ("reward", "kl_penalty", "token_rewards", "group", "loss_mask"),
    ),
    "reinforce_plus_plus": (
        "Discounted rewards from a token on, normalized over all tokens (Hu et al. 2025)",
        ("reward", "token_rewards", "loss_mask"),
    ),
    "reinforce_plus_plus_baseline": (
        "Reward minus the mean of its group, divided by the standard deviation of all tokens (Hu et al. 2025)",
        ("reward", "kl_penalty", "group", "loss_mask"),
    ),
    "remax": (
        "Rewards from a token on, minus the reward of the prompt's greedy response (Li et al. 2023)",
        ("reward", "token_rewards", "baseline", "loss_mask"),
    ),
    "rloo": ("Reward minus the mean of the other samples of its group (Ahmadian et al. 2024)", ("reward", "group")),
}
"""Summary and needed columns of each advantage. An advantage that needs `group` compares the samples of each group."""
POLICY_LOSSES = {
    "cispo": "Policy gradient weighted by a clipped ratio (MiniMax 2025)",
    "clipped_policy": "Clipped policy gradient (Schulman et al. 2017), symmetric or asymmetric",
    "gspo": "Clipped policy gradient by the ratio of whole sequences (Zheng et al. 2025)",
    "policy_gradient": "Policy gradient without a ratio (Williams 1992)",
    "sapo": "Policy gradient with a soft gate instead of a clip range (Gao et al. 2025)",
}
"""Summary of each loss made by `enginehouse_rl.losses.policy`. Each loss has a file of its name."""
CLIPPED = ("cispo", "clipped_policy", "gspo")
"""Losses that clip their ratio.

`gspo` clips the mean ratio of a whole sequence at 3e-4, which is less than the rounding differences between engines.
With the rollout's logprobs, these differences would clip half of the tokens that have a gradient. Therefore `gspo`
always needs logprobs from the actor.
"""
OTHER_LOSSES = {
    "clipped_value": ("values", "A critic's squared error, clipped around its old values (Schulman et al. 2017)"),
    "supervised": ("logprobs", "Negative log-likelihood of the chosen tokens"),
    "weighted_logprob": ("logprobs", "Logprobs weighted by a column: any policy gradient on any engine"),
    "weighted_value": ("values", "Values weighted by a column: any loss of values on any engine"),
}
"""The model output from which each loss is computed, and the summary of the loss."""


@hookimpl
def enginehouse_register_advantages(register):
    for name, (summary, needs) in ADVANTAGES.items():
        function = f"enginehouse_rl.advantages.{name}:{name}"
        compares = "group" in needs
        register(Advantage(name=name, summary=summary, function=function, compares_samples=compares, needs=needs))


@hookimpl
def enginehouse_register_losses(register):
    for name, summary in POLICY_LOSSES.items():
        register(
            Loss(
                name=name,
                summary=summary,
                function=f"enginehouse_rl.losses.{name}:{name}",
                needs_actor_logprobs=("importance_cap",),
                always_needs_actor_logprobs=name == "gspo",
                ratio_bounds=("clip_low", "clip_high") if name in CLIPPED else (),
                taken_from={"max_tokens": "rollout.sampling.max_tokens"},
            )
        )
    for name, (output, summary) in OTHER_LOSSES.items():
        function = f"enginehouse_rl.losses.{name}:{name}"
        register(Loss(name=name, summary=summary, function=function, output=output))


@hookimpl
def enginehouse_register_filters(register):
    register(
        Filter(
            name="mixed_rewards",
            summary="Groups whose rewards are not all equal: dynamic sampling (Yu et al. 2025)",
            function="enginehouse_rl.filters.mixed_rewards:mixed_rewards",
        )
    )


@hookimpl
def enginehouse_register_environments(register):
    register(
        Environment(
            name="single_turn",
            summary="One answer to each prompt, scored by the configured reward",
            environment="enginehouse_rl.environments.single_turn:SingleTurn",
        )
    )


@hookimpl
def enginehouse_register_trackers(register):
    for name, class_name, summary, requires in (
        ("tensorboard", "TensorBoard", "Event files for TensorBoard, in the run directory", ()),
        ("wandb", "WandB", "Weights & Biases, online or offline by its settings", ("wandb>=0.31",)),
        (
            "mlflow",
            "MLflow",
            "MLflow at MLFLOW_TRACKING_URI, or with a database in the run directory",
            ("mlflow-skinny>=3.5", "sqlalchemy>=2", "alembic>=1.13"),
        ),
    ):
        register(
            Tracker(
                name=name,
                summary=summary,
                tracker=f"enginehouse_rl.runs.trackers.{name}:{class_name}",
                requires=requires,
            )
        )


@hookimpl
def enginehouse_commands(cli):
    for name, (reference, summary) in COMMANDS.items():
        cli.add_lazy_command(name, f"enginehouse_rl.cli.{reference}", summary)


@hookimpl(trylast=True)
def enginehouse_run_step(run, step):
    return run.run_step(step)
