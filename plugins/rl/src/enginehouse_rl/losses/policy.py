"""The parts that all policy losses share: importance weights, KL term, entropy bonus, mean over tokens, and metrics.

A policy loss is written as an equation: a function of `PolicyTokens` that returns the loss of each token. `policy_loss`
turns the equation into a loss, which takes the arguments of the equation and the arguments of `finish_loss`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import torch
from pydantic import Field

from enginehouse.engines.train import LossValue, Mean, TokenView
from enginehouse_rl.config.schema import KLEstimator
from enginehouse_rl.losses.aggregate import Aggregation, aggregate, count_tokens
from enginehouse_rl.losses.importance import ImportanceLevel, ImportanceMode, importance_weights
from enginehouse_rl.losses.kl import cap_log_ratios, token_kl

__all__ = ["PolicyTokens", "policy_loss"]


class PolicyTokens:
    """The counted tokens of a micro-batch, concatenated over its rows; each tensor is `(counted,)`.

    Attributes:
        logprobs: Logprobs of the current policy, float32, with a gradient.
        old_logprobs: Logprobs from before the step's first update, float32.
        advantages: The advantages, float32.
        row: The row of each token, int64.
        rows: Number of rows.
    """

    def __init__(self, view: TokenView):
        self._view = view
        self._counted = view.counted_tokens()
        self.row, self.rows = view.row[self._counted], view.rows
        self.logprobs = self.output("logprobs")
        self.old_logprobs, self.advantages = self.column("old_logprobs"), self.column("advantages")

    def output(self, name: str) -> torch.Tensor:
        """Return the values of the model output `name` (`view.outputs`) at the counted tokens."""
        return self._view.outputs[name][self._counted]

    def column(self, name: str) -> torch.Tensor:
        """Return the values at the counted tokens of a column that has one value for each token."""
        return self._view.columns[name][self._counted]

    def row_column(self, name: str) -> torch.Tensor:
        """Return, for each counted token, the value of its row in a column `(rows,)`."""
        return self._view.columns[name][self.row]

    @property
    def log_ratio(self) -> torch.Tensor:
        """Logprob of each token minus its logprob from before the step's first update, at most `LARGEST_LOG_RATIO`."""
        return cap_log_ratios(self.logprobs - self.old_logprobs)

    def row_means(self, values: torch.Tensor) -> torch.Tensor:
        """Return for each token the mean of `values` over the tokens of its row."""
        totals = torch.zeros(self.rows, dtype=values.dtype, device=values.device).index_add(0, self.row, values)
        return (totals / count_tokens(self.row, self.rows, values.dtype).clamp(min=1))[self.row]


Equation = Callable[..., tuple[torch.Tensor, Mapping[str, torch.Tensor]]]
"""`equation(tokens: PolicyTokens, **arguments)` returns the loss of each token, and metrics with one value per token.
"""


def policy_loss(aggregation: Aggregation = "token_mean") -> Callable[[Equation], Callable[..., LossValue]]:
    """Return a decorator that turns an equation into a loss, which also takes the arguments of `finish_loss`.

    Args:
        aggregation: Default aggregation of the loss.
    """

    def decorate(equation: Equation) -> Callable[..., LossValue]:
        @functools.wraps(equation)
        def loss(view: TokenView, **arguments: Any) -> LossValue:
            shared = {name: arguments.pop(name) for name in SHARED if name in arguments}
            tokens = PolicyTokens(view)
            losses, figures = equation(tokens, **arguments)
            return finish_loss(tokens, losses, figures, **{"aggregation": aggregation} | shared)

        own_parameters = list(inspect.signature(equation, eval_str=True).parameters.values())[1:]
        shared = (SHARED | {"aggregation": SHARED["aggregation"].replace(default=aggregation)}).values()
        view = inspect.Parameter("view", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=TokenView)
        loss.__signature__ = inspect.Signature([view, *own_parameters, *shared], return_annotation=LossValue)  # type: ignore[attr-defined]
        summary, _, arguments_doc = (inspect.getdoc(equation) or "").partition("\n\nArgs:")
        _, _, shared_doc = (inspect.getdoc(finish_loss) or "").partition("Args:\n")
        loss.__doc__ = f"{summary}\n\nArgs:{arguments_doc}\n{shared_doc}"
        return loss

    return decorate


def finish_loss(
    tokens: PolicyTokens,
    losses: torch.Tensor,
    figures: Mapping[str, torch.Tensor],
    *,
    importance_cap: Annotated[float, Field(gt=0)] | None = None,
    importance_level: ImportanceLevel = "token",
    importance_mode: ImportanceMode = "truncate",
    aggregation: Aggregation = "token_mean",
    max_tokens: Annotated[int, Field(gt=0)] | None = None,
    kl_coefficient: float = 0.0,
    kl_estimator: KLEstimator = "k3",
    entropy_coefficient: float = 0.0,
) -> LossValue:
    """Weigh the tokens' losses, add the terms that do not depend on the advantages, and aggregate them.

    The metrics are `figures`, `ratio`, and `policy_kl`, which is the estimate k3 of KL(old policy || current policy).
    Arguments that are set add `kl`, `entropy`, `importance_weight`, and `importance_capped`, the fraction of the tokens
    whose weight was above the cap.

    Args:
        importance_cap: multiply each token's loss and KL term, but not the entropy bonus, by a weight of at most this
            number: the token's probability under the actor, divided by its probability under the rollout. See
            `enginehouse_rl.losses.importance`. Needs `algorithm.old_logprobs=actor`, because all weights are 1 with
            the rollout's logprobs.
        importance_level: compute a weight for each `token`, or one weight for all tokens of a `sequence`.
        importance_mode: a weight above the cap is lowered to the cap (`truncate`), or set to 0 (`mask`).
        aggregation: the kind of mean over tokens and sequences. `enginehouse_rl.losses.aggregate` lists the kinds.
        max_tokens: divisor of `sequence_mean_token_sum_scaled`; if unset, a run uses `rollout.sampling.max_tokens`.
        kl_coefficient: weight of the divergence from the reference.
        kl_estimator: `"k2"`, `"k3"`, or `"k3_unbiased"`, which is multiplied by the ratio. `losses.kl` compares the
            estimators.
        entropy_coefficient: weight of the entropy bonus.
    """
    extra: dict[str, torch.Tensor] = {}
    if kl_coefficient:
        extra["kl"] = token_kl(tokens.logprobs, tokens.column("reference_logprobs"), kl_estimator)
        if kl_estimator == "k3_unbiased":
            extra["kl"] = extra["kl"] * tokens.log_ratio.exp()
        losses = losses + kl_coefficient * extra["kl"]
    if importance_cap is not None:
        weights, cut = importance_weights(tokens, importance_cap, importance_level, importance_mode)
        losses = losses * weights
        extra |= {"importance_weight": weights, "importance_capped": cut}
    if entropy_coefficient:
        extra["entropy"] = tokens.output("entropy")
        losses = losses - entropy_coefficient * extra["entropy"]
    total, weight = aggregate(losses, tokens.row, tokens.rows, aggregation, max_tokens)
    with torch.no_grad():
        log_ratio = tokens.log_ratio
        measured = {**figures, "ratio": log_ratio.exp(), "policy_kl": log_ratio.expm1() - log_ratio, **extra}
        sums = torch.stack([value.sum().float() for value in measured.values()]).tolist()  # one transfer
    count = float(len(tokens.row))
    return LossValue(total, weight, {name: Mean(value, count) for name, value in zip(measured, sums, strict=True)})


SHARED = {
    name: parameter
    for name, parameter in inspect.signature(finish_loss, eval_str=True).parameters.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY
}
"""The arguments that every policy loss has, by name."""
