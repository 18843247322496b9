"""Per-token estimators of KL(policy || reference) from the logprobs of sampled tokens.

Source: J. Schulman, "Approximating KL Divergence" (2020). With r = p_reference(token) / p_policy(token), for tokens
sampled from the policy:

|                      | value                        | expected gradient, as a loss   | and in the reward    |
|----------------------|------------------------------|--------------------------------|----------------------|
| k1 = -log r          | unbiased, may be negative    | zero: it regularises nothing   | reverse              |
| k2 = (log r)^2 / 2   | biased, low variance         | reverse: KL(policy, reference) | about zero           |
| k3 = (r - 1) - log r | unbiased, low variance       | forward: KL(reference, policy) | reverse - forward    |
| k3_unbiased          | k3 times the policy's ratio  | reverse                        |                      |

As a loss, an estimate is differentiated with the sampled tokens held fixed. The gradient then lacks one part: the
effect of an update on how likely each token is to be sampled. For k1, this part is the whole gradient. In the reward,
an estimate is a number without a gradient, so the policy gradient contains only the part that the loss lacks. For k3 in
the reward, reverse and forward divergence cancel near the reference; far from the reference, k3 drives the policy away
from it. Therefore `plan` requires `k1` in the reward and another estimator in the loss (Tang & Munos 2025, "On a few
pitfalls in KL divergence gradient estimation for RL"; Liu et al. 2025, "Rethinking KL Regularization in RLHF").

`k3_unbiased` is from DeepSeek-V3.2 (2025), section 3.1. Its ratio has a gradient too, so the product has the gradient
of the reverse divergence, even for tokens of an older policy. `enginehouse_rl.losses.policy` multiplies by the ratio.
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
"""Maximum of a log ratio, in nats, because exp(89) exceeds float32. Correct engines never differ by this much."""
KL_PENALTY = "kl_penalty"
"""Column `(rows,)` with the KL term of each row, for an advantage that needs it separate from the reward."""


def cap_log_ratios(log_ratio: torch.Tensor) -> torch.Tensor:
    """Cap log ratios at `LARGEST_LOG_RATIO` before exponentiation. A capped ratio has no gradient."""
    return log_ratio.clamp(max=LARGEST_LOG_RATIO)


def token_kl(logprobs: torch.Tensor, reference_logprobs: torch.Tensor, estimator: KLEstimator) -> torch.Tensor:
    """Estimate the divergence at each token.

    Args:
        logprobs: The policy's logprobs, float `(tokens,)`; may carry a gradient.
        reference_logprobs: The reference's logprobs, float `(tokens,)`.
        estimator: An entry of `ESTIMATORS`. `k3_unbiased` gives `k3`, which the caller multiplies by the ratio.

    Returns:
        The divergence in nats, float `(tokens,)`.

    Raises:
        ConfigError: The estimator is unknown.
    """
    log_ratio = reference_logprobs - logprobs
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    if estimator in ("k3", "k3_unbiased"):
        log_ratio = cap_log_ratios(log_ratio)
        return log_ratio.expm1() - log_ratio
    raise ConfigError(f"unknown KL estimator {estimator!r}. {nearest(estimator, ESTIMATORS)}")


def adapt_coefficient(coefficient: float, divergence: float, target: float) -> float:
    """Return the coefficient for the next step: up to 2% larger if the divergence exceeds `target`, smaller if it is
    below.

    Source: Ziegler et al. 2019, "Fine-Tuning Language Models from Human Preferences", section 2.2, with K = 0.1.
    """
    error = min(max(divergence / target - 1, -0.2), 0.2)
    return coefficient * (1 + 0.1 * error)


def resumed_coefficient(kl: KLConfig, earlier: Mapping[str, Any], saved: float | None) -> float:
    """Return the coefficient with which a resumed run begins.

    It is the adapted coefficient of the checkpoint, unless the coefficient in the config has changed, or one of the two
    runs does not adapt its coefficient.

    Args:
        kl: The KL term of the config.
        earlier: `algorithm.kl` of the run that is resumed; empty if unknown.
        saved: The coefficient in the checkpoint of that run, if the checkpoint has one.
    """
    adapting = kl.target is not None and earlier.get("target") is not None
    if saved is None or not adapting or earlier.get("coefficient") != kl.coefficient:
        return kl.coefficient
    return saved


def with_kl_in_reward(
    batch: DistributedBatch, coefficient: float, estimator: KLEstimator, into: str = "reward"
) -> tuple[DistributedBatch, float]:
    """Subtract the KL term from the rewards: `coefficient` times the divergence at each token that `loss_mask` counts.

    Args:
        batch: Columns `reward`, `loss_mask`, `reference_logprobs`, and `old_logprobs` if the actor recomputed them,
            otherwise `rollout_logprobs`.
        coefficient: Factor of the divergence.
        estimator: An estimator of `token_kl`.
        into: The column that changes. From `"reward"`, the sum over the tokens of a row is subtracted. From
            `"token_rewards"` (ragged float32, created if it is missing), the term of each token is subtracted.
            `KL_PENALTY` becomes the sum over the tokens of a row, and the rewards stay unchanged.

    Returns:
        The batch, and the mean divergence over the tokens that `loss_mask` counts.
    """
    old = "old_logprobs" if "old_logprobs" in batch else "rollout_logprobs"
    by_token = into == "token_rewards"
    per_row, per_token, tokens = [torch.zeros(0)], [torch.zeros(0)], 0.0
    earlier = [into] if by_token and into in batch else []
    for part in batch.select(["loss_mask", old, "reference_logprobs", *earlier]).shards():
        mask = part["loss_mask"]
        divergence = token_kl(part[old].values, part["reference_logprobs"].values, estimator)
        divergence = divergence.masked_fill(~mask.values, 0.0)  # it may be infinite at tokens that do not count
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
