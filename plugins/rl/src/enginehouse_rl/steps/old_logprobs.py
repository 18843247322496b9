"""A stage in which the actor recomputes the logprobs of the samples, which are the denominator of the policy ratio."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from enginehouse.controller import Balanced
from enginehouse.engines.train import Mean
from enginehouse_rl.episodes.sampling import make_sampling_outputs
from enginehouse_rl.steps.stage import BatchStage

if TYPE_CHECKING:
    from enginehouse.controller import DistributedBatch
    from enginehouse.roles.placement import Roles


class OldLogprobsStage(BatchStage):
    """Adds `old_logprobs`, and measures the mean `entropy`.

    A run without this stage uses the rollout's logprobs (`fill_defaults`), and its update measures the entropy.
    """

    phase = "old_logprobs"

    def __call__(self, batch: DistributedBatch, roles: Roles) -> DistributedBatch:
        sampling = self.plan.config.rollout.sampling
        outputs = replace(make_sampling_outputs(sampling, entropy=True), entropy_gradient=False)
        dealt = Balanced(batch.select(["input_ids", "loss_mask"]), by="input_ids")
        batch = batch.joined(roles.actor.forward(dealt, outputs, "old_"))
        entropy = Mean(0.0, 0.0)
        for part in batch.select(["old_entropy", "loss_mask"]).shards():
            entropies = part["old_entropy"].values[part["loss_mask"].values]
            entropy += Mean(entropies.sum().item(), float(len(entropies)))
        self.figures = {"entropy": entropy.value}
        return batch.drop(["old_entropy"])
