"""Per-token estimators of KL(policy || reference) from the logprobs of sampled tokens.

Source: J. Schulman, "Approximating KL Divergence" (2020). With r = p_reference(token) / p_policy(token), tokens drawn
from the policy:

* k1 = -log r                unbiased, high variance, may be negative
* k2 = (log r)^2 / 2         biased, low variance; its gradient is that of the KL
* k3 = (r - 1) - log r       unbiased, low variance, never negative
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from enginehouse.errors import ConfigError, nearest

if TYPE_CHECKING:
    import torch

ESTIMATORS = ("k1", "k2", "k3")


def token_kl(logprobs: torch.Tensor, reference_logprobs: torch.Tensor, estimator: str) -> torch.Tensor:
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
