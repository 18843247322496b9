"""The most general policy loss: minus the sum of weight times logprob, per counted token.

The gradient of any loss that sees the policy only through its logprobs is a weight for each logprob. Who computes those
weights outside can train any algorithm on an engine that can do nothing else.
"""

from __future__ import annotations

from enginehouse.engines.train import LossValue, TokenView


def weighted_logprob(view: TokenView, *, column: str = "weights") -> LossValue:
    """Compute the mean over counted tokens of `-weight * logprob`.

    Args:
        view: output `logprobs`; columns `loss_mask` and `column`, float32 `(tokens,)`.
        column: name of the column of weights.
    """
    counted = view.columns["loss_mask"].nonzero().squeeze(-1)
    losses = -view.columns[column][counted] * view.outputs["logprobs"][counted]
    return LossValue(losses.sum(), float(len(counted)))
