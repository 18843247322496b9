"""Samples of a step: from what the rollout returned to a training batch with rewards and groups."""

from __future__ import annotations

import collections
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from enginehouse.errors import ConfigError

if TYPE_CHECKING:
    from enginehouse.data import Batch
    from enginehouse.engines.environment import Score


RESERVED = (
    *("mean", "std", "max", "min", "groups_all_equal", "failures"),
    *("reward_stderr", "tokens_mean", "truncated", "dropped"),
)
"""Names under `reward/` or `validation/` that are the run's own, so that no figure of a reward may have them."""
RESERVED_BEGINNINGS = ("mean@", "pass@")
"""What names under `validation/` that are the run's own begin with."""


def response_lengths(samples: Batch) -> torch.Tensor:
    """Tokens the policy chose, int64 `(rows,)`."""
    return samples["loss_mask"].reduced(np.add)


def sample_rows(samples: Batch) -> list[dict[str, Any]]:
    """What the model said and what it got for it, a plain row a sample, for `samples/`."""
    names = ("prompt", "response", "reward", "finish_reason", "tokens")
    columns = (
        samples["prompt"],
        samples["response"],
        samples["reward"].tolist(),
        samples["finish_reason"],
        response_lengths(samples).tolist(),
    )
    rows = [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
    for row, figures, failure in zip(rows, samples["reward_figures"], samples["reward_failure"], strict=True):
        row |= {f"reward/{name}": value for name, value in figures.items()}
        if failure:
            row["reward_failure"] = failure
    return rows


def check_figures(scores: Sequence[Score], function: str) -> None:
    """Refuse names of figures of a reward that the run's metrics could not bear.

    Raises:
        ConfigError: a figure has a name of the run's own, or one with a "/" in it.
    """
    for name in dict.fromkeys(name for score in scores for name in score.figures):
        if name in RESERVED or name.startswith(RESERVED_BEGINNINGS):
            raise ConfigError(
                f"reward.function: {function} returns a figure {name!r}, which is what a metric of the run's "
                "own is called, in reward/ or validation/: name it differently"
            )
        if "/" in name:
            raise ConfigError(
                f"reward.function: {function} returns a figure {name!r}, and a '/' stands between a validation "
                f"file or value and its metric: name it differently, {name.replace('/', '_')!r} for one"
            )


def reward_figures(samples: Batch, prefix: str) -> dict[str, float]:
    """`PREFIX/failures`, the rows without a reward, and the mean of each figure over the rows that have it."""
    named = collections.defaultdict(list)
    for figures in samples["reward_figures"]:
        for name, value in figures.items():
            named[f"{prefix}/{name}"].append(value)
    failures = float(sum(map(bool, samples["reward_failure"])))
    return {f"{prefix}/failures": failures} | {name: statistics.fmean(values) for name, values in named.items()}


def sample_metrics(samples: Batch, version: int) -> dict[str, float]:
    """Figures of a step's samples: rewards, lengths in tokens, share that ended by itself, weight versions.

    Rows without a token of the policy's, as of an episode that failed, count in `reward/...` alone.

    Args:
        version: of the trainer's weights: `staleness/...` is how many versions a sample's first token is behind.
    """
    reward, drawn = samples["reward"], samples["weight_version"] >= 0
    _, group = samples["group"].unique(return_inverse=True)
    best = torch.full((int(group.max()) + 1,), -torch.inf).scatter_reduce_(0, group, reward, "amax")
    worst = torch.full_like(best, torch.inf).scatter_reduce_(0, group, reward, "amin")
    figures = {
        "reward/mean": reward.mean().item(),
        "reward/std": reward.std(correction=0).item(),
        "reward/max": reward.max().item(),
        "reward/min": reward.min().item(),
        "reward/groups_all_equal": (best == worst).float().mean().item(),
        **reward_figures(samples, "reward"),
    }
    if not drawn.any():
        return figures
    lengths = response_lengths(samples)[drawn].float()
    stopped = torch.tensor([reason == "stop" for reason in samples["finish_reason"]])[drawn]
    behind = (version - samples["first_version"][drawn]).float()
    return figures | {
        "response/tokens_mean": lengths.mean().item(),
        "response/tokens_max": lengths.max().item(),
        "response/stopped": stopped.float().mean().item(),
        "weights/version": float(samples["weight_version"][drawn].min()),
        "staleness/mean": behind.mean().item(),
        "staleness/max": behind.max().item(),
    }
