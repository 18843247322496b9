from __future__ import annotations

from typing import TYPE_CHECKING

from enginehouse_rl.episodes.sampling import make_sampling_outputs
from enginehouse_rl.steps.stage import BatchStage

if TYPE_CHECKING:
    from enginehouse.controller import DistributedBatch
    from enginehouse.roles.placement import Roles


class ReferenceStage(BatchStage):
    """Adds `reference_logprobs`, which a KL term or an advantage estimator compares with the policy's logprobs."""

    phase = "reference"

    def __call__(self, batch: DistributedBatch, roles: Roles) -> DistributedBatch:
        outputs = make_sampling_outputs(self.plan.config.rollout.sampling)
        return batch.joined(roles.score_by_reference(batch.select(["input_ids", "loss_mask"]), outputs))
