"""Truncated importance sampling: what corrects a policy gradient for the rollout engine's being another one.

Samples are drawn by the rollout engine, with probability p_rollout, and trained on by the actor, whose p_old differs
a little though its weights are the same. Weighting each token by p_old / p_rollout makes the gradient the actor's own;
cutting the weight at a cap bounds its variance, at the price of a small bias.

Source: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"; the truncation is
that of IMPALA (Espeholt et al. 2018), eq. 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from enginehouse.errors import ConfigError

if TYPE_CHECKING:
    from enginehouse.engines.train import TokenView


def truncated_importance(view: TokenView, counted: torch.Tensor, cap: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `min(exp(old_logprobs - rollout_logprobs), cap)` of each counted token, without a gradient.

    Args:
        view: columns `old_logprobs`, as the actor computed them, and `rollout_logprobs`, float32 `(tokens,)`.
        counted: int64 `(counted,)`, the tokens the loss counts.
        cap: largest weight; more than 0.

    Returns:
        The weights, float32 `(counted,)`, and which of them were cut, bool `(counted,)`.

    Raises:
        ConfigError: `cap` is not more than 0.
    """
    if not cap > 0:
        raise ConfigError(f"importance_cap is {cap:g}; it is the largest weight of a token, 2.0 say, and more than 0")
    with torch.no_grad():
        log_ratio = view.columns["old_logprobs"][counted] - view.columns["rollout_logprobs"][counted]
        ratio = log_ratio.exp()
        return ratio.clamp(max=cap), ratio > cap
