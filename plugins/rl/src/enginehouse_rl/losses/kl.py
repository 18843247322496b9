"""Per-token estimators of KL(policy || reference) from the logprobs of sampled tokens.

Source: J. Schulman, "Approximating KL Divergence" (2020). With r = p_reference(token) / p_policy(token), tokens drawn
from the policy:

|                      | value                        | expected gradient, as a loss   | and in the reward    |
|----------------------|------------------------------|--------------------------------|----------------------|
| k1 = -log r          | unbiased, may be negative    | zero: it regularises nothing   | reverse              |
| k2 = (log r)^2 / 2   | biased, low variance         | reverse: KL(policy, reference) | about zero           |
| k3 = (r - 1) - log r | unbiased, low variance       | forward: KL(reference, policy) | reverse less forward |
| k3_unbiased          | k3 times the policy's ratio  | reverse                        |                      |

As a loss the gradient is that of the estimate alone, by the tokens as they were drawn; what it leaves out, that other
tokens get likelier, is the whole gradient of k1. In the reward the estimate is a number, and the policy gradient has
that part alone: near the reference the reverse and the forward cancel, and far from it k3 drives the policy away. So
`k1` is for the reward, and the others are for the loss, which `plan` holds (Tang & Munos 2025, "On a few pitfalls in KL
divergence gradient estimation for RL"; Liu et al. 2025, "Rethinking KL Regularization in RLHF").

`k3_unbiased` is DeepSeek-V3.2's (2025), section 3.1: the ratio has a gradient, too, and what comes of both is the
reverse's, also for tokens that an older policy drew. The loss multiplies by the ratio (`enginehouse_rl.losses.policy`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, get_args

import torch

from enginehouse.data import Ragged
from enginehouse.errors import ConfigError, nearest
from enginehouse_rl.config.schema import KLConfig, KLEstimator

if TYPE_CHECKING:
    from enginehouse.controller import DistributedBatch

ESTIMATORS = get_args(KLEstimator)
LARGEST_LOG_RATIO = 20.0
"""Nats; e to the 89th is no float32. Only two engines that are at odds find one token so much likelier."""
KL_PENALTY = "kl_penalty"
"""A column `(rows,)`: what the KL term takes off each row's reward, for an advantage that needs it beside that."""


def bounded(log_ratio: torch.Tensor) -> torch.Tensor:
    """Cut log ratios at `LARGEST_LOG_RATIO`, before they are raised to e; a larger one has no gradient."""
    return log_ratio.clamp(max=LARGEST_LOG_RATIO)


def token_kl(logprobs: torch.Tensor, reference_logprobs: torch.Tensor, estimator: KLEstimator) -> torch.Tensor:
    """Estimate the divergence at each token.

    Args:
        logprobs: float `(tokens,)`, the policy's; may carry a gradient.
        reference_logprobs: float `(tokens,)`.
        estimator: one of `ESTIMATORS`; `k3_unbiased` is `k3` before its ratio.

    Returns:
        float `(tokens,)`, in nats.

    Raises:
        ConfigError: unknown estimator.
    """
    log_ratio = reference_logprobs - logprobs
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    if estimator in ("k3", "k3_unbiased"):
        log_ratio = bounded(log_ratio)
        return log_ratio.expm1() - log_ratio
    raise ConfigError(f"unknown KL estimator {estimator!r}; {nearest(estimator, ESTIMATORS)}")


def adapted(coefficient: float, divergence: float, target: float) -> float:
    """The next step's coefficient: larger after a divergence above `target`, smaller below it, by at most 2%.

    Source: Ziegler et al. 2019, "Fine-Tuning Language Models from Human Preferences", section 2.2, with K = 0.1.
    """
    error = min(max(divergence / target - 1, -0.2), 0.2)
    return coefficient * (1 + 0.1 * error)


def resumed_coefficient(kl: KLConfig, earlier: Mapping[str, Any], saved: float | None) -> float:
    """The coefficient that a resumed run begins with.

    Args:
        kl: as the config says now.
        earlier: `algorithm.kl` of the run that is gone on from; empty: not known.
        saved: the coefficient of its checkpoint; None: it has none.

    Returns:
        The one that was adapted so far; the config's, where that is another than before, or was not adapted.
    """
    adapting = kl.target is not None and earlier.get("target") is not None
    if saved is None or not adapting or earlier.get("coefficient") != kl.coefficient:
        return kl.coefficient
    return saved


def with_kl_in_reward(
    batch: DistributedBatch, coefficient: float, estimator: KLEstimator, into: str = "reward"
) -> tuple[DistributedBatch, float]:
    """Take `coefficient` times the divergence of each row's tokens off its reward.

    Args:
        batch: `reward`, `loss_mask`, `reference_logprobs`, and `old_logprobs` where the actor computed them anew; else
            `rollout_logprobs`.
        coefficient: what the divergence is multiplied with.
        estimator: as of `token_kl`.
        into: the column that it is taken off: `"reward"`, or `"token_rewards"`, ragged float32, each token's own, 0
            where there are none yet. `KL_PENALTY` adds that column instead, and leaves the rewards as they are.

    Returns:
        The batch; and the mean divergence of the tokens of `loss_mask`.
    """
    old = "old_logprobs" if "old_logprobs" in batch else "rollout_logprobs"
    by_token = into == "token_rewards"
    per_row, per_token, tokens = [torch.zeros(0)], [torch.zeros(0)], 0.0
    earlier = [into] if by_token and into in batch else []
    for part in batch.select(["loss_mask", old, "reference_logprobs", *earlier]).shards():
        mask = part["loss_mask"]
        divergence = token_kl(part[old].values, part["reference_logprobs"].values, estimator)
        divergence = divergence.masked_fill(~mask.values, 0.0)  # whatever it is there, infinite too
        per_row.append(torch.zeros(len(part)).index_add_(0, mask.row, divergence))
        if by_token:
            per_token.append(sum((part[name].values for name in earlier), -coefficient * divergence))
        tokens += mask.values.sum().item()
    of_rows = torch.cat(per_row)
    if by_token:
        token_rewards = Ragged.from_lengths(torch.cat(per_token), batch.lengths("loss_mask"))
        batch = batch.with_columns(token_rewards=token_rewards)
    elif into == KL_PENALTY:
        batch = batch.with_columns(kl_penalty=coefficient * of_rows)
    else:
        batch = batch.with_columns(reward=batch["reward"] - coefficient * of_rows)
    return batch, of_rows.sum().item() / max(tokens, 1)
