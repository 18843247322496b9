"""Importance weights correct a policy gradient for samples that another engine generated.

The rollout engine samples a token with probability p_rollout. The actor has the same weights, but its p_old differs a
little. With the weight p_old / p_rollout for each token, the gradient is correct for the actor's policy. Capping or
masking large weights bounds the variance, at the price of a small bias. The ratio of a whole sequence is the product of
its tokens' ratios. It also accounts for the states in which tokens were sampled, but varies far more.

Sources: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training". Weights are
truncated as in IMPALA (Espeholt et al. 2018), eq. 1. Weights of sequences, and masks, are from Liu et al. 2025, "When
Speed Kills Stability".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

import torch

from enginehouse.errors import ConfigError, nearest
from enginehouse_rl.losses.kl import cap_log_ratios

if TYPE_CHECKING:
    from enginehouse_rl.losses.policy import PolicyTokens

ImportanceLevel = Literal["token", "sequence"]
ImportanceMode = Literal["truncate", "mask"]


def importance_weights(
    tokens: PolicyTokens, cap: float, level: ImportanceLevel = "token", mode: ImportanceMode = "truncate"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `exp(old_logprobs - rollout_logprobs)` of each counted token, bounded by `cap`, without a gradient.

    Args:
        tokens: The counted tokens, with the actor's `old_logprobs` and a column `rollout_logprobs`, float32.
        cap: The largest weight; more than 0.
        level: `"sequence"` gives each token the product over the counted tokens of its row.
        mode: A weight above the cap becomes the cap (`"truncate"`) or 0 (`"mask"`).

    Returns:
        The weights, float32 `(counted,)`, and a mask of the weights that were above the cap, bool `(counted,)`.

    Raises:
        ConfigError: `cap` is 0 or less, or the level or mode is unknown.
    """
    if not cap > 0:
        raise ConfigError(
            f"importance_cap, the largest weight of a token, must be more than 0 (such as 2), not {cap:g}"
        )
    for key, value, choices in (("level", level, get_args(ImportanceLevel)), ("mode", mode, get_args(ImportanceMode))):
        if value not in choices:
            raise ConfigError(f"unknown importance_{key} {value!r}. {nearest(value, choices)}")
    with torch.no_grad():
        log_ratio = tokens.old_logprobs - tokens.column("rollout_logprobs")
        if level == "sequence":
            log_ratio = log_ratio.new_zeros(tokens.rows).index_add_(0, tokens.row, log_ratio)[tokens.row]
        ratio = cap_log_ratios(log_ratio).exp()
        outside = ratio > cap
        return ratio.masked_fill(outside, cap if mode == "truncate" else 0.0), outside
