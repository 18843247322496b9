"""The updates of a step: the batch that the trained roles get, and the loss of each role."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from enginehouse.data.columns import FOR_PEOPLE
from enginehouse.engines.train import LossSpec
from enginehouse.roles.sequence_scores import VALUES
from enginehouse.roles.workers import TRAINED
from enginehouse_rl.episodes.sampling import make_sampling_outputs, make_step_seed
from enginehouse_rl.loop.running_updates import Update
from enginehouse_rl.steps.minibatches import assign_minibatches
from enginehouse_rl.steps.mismatch import add_measurement

if TYPE_CHECKING:
    from enginehouse.controller import DistributedBatch
    from enginehouse_rl.plan.plan import Plan


def make_updates(plan: Plan, batch: DistributedBatch, step: int, version: int) -> dict[str, Update]:
    """Return the update of each trained role.

    Args:
        version: The version of the weights that compute the first forward pass of the updates.
    """
    algorithm, critic = plan.config.algorithm, plan.config.critic
    update = Update(_make_training_batch(plan, batch, step), _make_loss(plan), algorithm.minibatches, algorithm.epochs)
    updates = {}
    if "critic" not in plan.roles or step > critic.warmup_steps:
        first_loss = add_measurement(update.loss, version) if plan.old_logprobs == "rollout" else None
        updates["actor"] = replace(update, first_loss=first_loss)
    if plan.critic_loss is not None:
        updates["critic"] = replace(update, loss=LossSpec(critic.loss.name, dict(plan.critic_loss.arguments), VALUES))
    return updates


def _make_training_batch(plan: Plan, batch: DistributedBatch, step: int) -> DistributedBatch:
    """Keep only numeric columns. With several mini-batches, add the index of the mini-batch of each row, for each pass
    over the samples. With `algorithm.mask_truncated`, add a mask of the rows that are trained on."""
    algorithm = plan.config.algorithm
    if algorithm.mask_truncated:
        cut = torch.tensor([reason == "length" for reason in batch["finish_reason"]])
        batch = batch.with_columns(**{TRAINED: ~cut})
    batch = batch.drop([name for name in batch.columns if name in FOR_PEOPLE or batch.is_objects(name)])
    if algorithm.minibatches == 1:
        return batch
    seed = make_step_seed(plan.config.train.seed, step)
    minibatch = assign_minibatches(len(batch), algorithm.minibatches, algorithm.epochs, seed)
    return batch.with_columns(minibatch=minibatch)


def _make_loss(plan: Plan) -> LossSpec:
    """Return the configured loss, including the KL term if its place is the loss."""
    algorithm, arguments = plan.config.algorithm, dict(plan.loss.arguments)
    if algorithm.kl.coefficient and algorithm.kl.place == "loss":
        arguments |= {"kl_coefficient": algorithm.kl.coefficient, "kl_estimator": algorithm.kl.chosen_estimator}
    entropy = bool(arguments.get("entropy_coefficient"))
    return LossSpec(algorithm.loss.name, arguments, make_sampling_outputs(plan.config.rollout.sampling, entropy))
