"""Per-token estimators of KL(policy || reference) from the logprobs of sampled tokens.

Source: J. Schulman, "Approximating KL Divergence" (2020). With r = p_reference(token) / p_policy(token), tokens drawn
from the policy:

|                      | value                                    | expected gradient, as a loss          |
|----------------------|------------------------------------------|---------------------------------------|
| k1 = -log r          | unbiased, high variance, may be negative | zero: it regularises nothing          |
| k2 = (log r)^2 / 2   | biased, low variance                     | of KL(policy, reference), the reverse |
| k3 = (r - 1) - log r | unbiased, low variance, never negative   | of KL(reference, policy), the forward |

The gradient is that of the estimate alone, by the tokens as they were drawn; what it leaves out, that other tokens get
likelier, is the whole gradient of k1. Taken off the reward, where the policy gradient counts that, k1 is the unbiased
choice, and the term is the reverse divergence (Tang & Munos 2025, "On a few pitfalls in KL divergence gradient
estimation for RL").
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, get_args

import torch

from enginehouse.config.schema import KL, KLEstimator
from enginehouse.data import Ragged
from enginehouse.errors import ConfigError, nearest

if TYPE_CHECKING:
    from enginehouse.controller import DistributedBatch

ESTIMATORS = get_args(KLEstimator)


def token_kl(logprobs: torch.Tensor, reference_logprobs: torch.Tensor, estimator: KLEstimator) -> torch.Tensor:
    """Estimate the divergence at each token.

    Args:
        logprobs: float `(tokens,)`, the policy's; may carry a gradient.
        reference_logprobs: float `(tokens,)`.
        estimator: `"k1"`, `"k2"` or `"k3"`.

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
    if estimator == "k3":
        return log_ratio.expm1() - log_ratio
    raise ConfigError(f"unknown KL estimator {estimator!r}; {nearest(estimator, ESTIMATORS)}")


def adapted(coefficient: float, divergence: float, target: float) -> float:
    """The next step's coefficient: larger after a divergence above `target`, smaller below it, by at most 2%.

    Source: Ziegler et al. 2019, "Fine-Tuning Language Models from Human Preferences", section 2.2, with K = 0.1.
    """
    error = min(max(divergence / target - 1, -0.2), 0.2)
    return coefficient * (1 + 0.1 * error)


def resumed_coefficient(kl: KL, earlier: Mapping[str, Any], saved: float | None) -> float:
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
    batch: DistributedBatch, coefficient: float, estimator: KLEstimator, by_token: bool = False
) -> tuple[DistributedBatch, float]:
    """Take `coefficient` times the divergence of each row's tokens off its reward.

    Args:
        batch: `reward`, `loss_mask`, `reference_logprobs`, and `old_logprobs` where the actor computed them anew; else
            `rollout_logprobs`.
        coefficient: what the divergence is multiplied with.
        estimator: as of `token_kl`.
        by_token: take each token's off its own `token_rewards`, ragged float32, 0 where there are none yet; else the
            sum of a row's off its `reward`.

    Returns:
        The batch; and the mean divergence of the tokens of `loss_mask`.
    """
    old = "old_logprobs" if "old_logprobs" in batch else "rollout_logprobs"
    per_row, per_token, tokens = [torch.zeros(0)], [torch.zeros(0)], 0.0
    earlier = ["token_rewards"] if by_token and "token_rewards" in batch else []
    for part in batch.select(["loss_mask", old, "reference_logprobs", *earlier]).shards():
        mask = part["loss_mask"]
        divergence = token_kl(part[old].values, part["reference_logprobs"].values, estimator) * mask.values
        per_row.append(torch.zeros(len(part)).index_add_(0, mask.row, divergence))
        if by_token:
            per_token.append(sum((part[name].values for name in earlier), -coefficient * divergence))
        tokens += mask.values.sum().item()
    of_rows = torch.cat(per_row)
    if by_token:
        token_rewards = Ragged.from_lengths(torch.cat(per_token), batch.lengths("loss_mask"))
        batch = batch.with_columns(token_rewards=token_rewards)
    else:
        batch = batch.with_columns(reward=batch["reward"] - coefficient * of_rows)
    return batch, of_rows.sum().item() / max(tokens, 1)
