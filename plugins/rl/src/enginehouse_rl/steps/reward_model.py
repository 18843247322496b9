from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from enginehouse.controller import Balanced
from enginehouse.roles.device_turns import PARAMS
from enginehouse_rewards.pool import RewardError
from enginehouse_rl.episodes.episode_rows import EpisodeRows
from enginehouse_rl.steps.stage import BatchStage

if TYPE_CHECKING:
    from enginehouse.controller import DistributedBatch, WorkerGroup
    from enginehouse.roles.placement import Roles


class RewardModelStage(BatchStage):
    """Adds a reward model's score to `reward`, to `rewards` as the last entry, and to the metrics as `model`."""

    phase = "reward"
    scores = True

    def __call__(self, batch: DistributedBatch, roles: Roles) -> DistributedBatch:
        return add_model_scores(batch, roles, self.plan.config.reward_model.weight)


def add_model_scores(samples: DistributedBatch, roles: Roles, weight: float) -> DistributedBatch:
    """Add the reward model's score, if the run has one, to `reward`, `rewards` (as the last) and the metrics (`model`).

    The score of an episode is the score of its last row. An episode without a token of the policy keeps its reward.

    Args:
        samples: Rows of `collect_rows`.
        weight: The factor of the score.

    Raises:
        RewardError: A score is not finite.
    """
    if (group := roles.groups.get("reward_model")) is None or not len(samples):
        return samples
    scores, drawn = score_episodes(samples, roles, group)
    figures = [
        {**figures, "model": score} if has_score else figures
        for figures, score, has_score in zip(samples["reward_figures"], scores.tolist(), drawn.tolist(), strict=True)
    ]
    columns = {"reward": samples["reward"] + weight * scores, "reward_figures": figures}
    if "rewards" in samples:
        columns["rewards"] = torch.cat([samples["rewards"], scores[:, None]], 1)
    return samples.with_columns(**columns)


def score_episodes(samples: DistributedBatch, roles: Roles, group: WorkerGroup) -> tuple[torch.Tensor, torch.Tensor]:
    """Score the last row of each episode with a model that has a value head.

    Args:
        samples: Rows of `collect_rows`, at least one.
        group: The model's workers.

    Returns:
        The scores, float32 `(rows,)`, 0 in rows without a score, and a mask of the rows with a score, bool `(rows,)`.

    Raises:
        RewardError: A score is not finite.
    """
    last = EpisodeRows(samples["episode"]).last
    rows = samples.select(["input_ids"]).take(last)
    with roles.turns.on_devices(PARAMS):
        scores = group.score_rows(Balanced(rows, by="input_ids")).column("score")
    if not scores.isfinite().all():
        row = int((~scores.isfinite()).nonzero()[0])
        raise RewardError(
            f"the score of a reward model must be finite, but sample {row} of the step has the score "
            f"{scores[row].item()}"
        )
    drawn = torch.zeros(len(samples), dtype=torch.bool)
    drawn[last] = samples["weight_version"][last] >= 0
    return torch.zeros(len(samples)).index_copy_(0, last, scores) * drawn, drawn
