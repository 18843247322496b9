"""Logprobs and entropies from hidden states and the weight of a language model's head, a block of logits at a time.

If all logits fit one block, they are kept for the backward pass. Otherwise forward computes blocks of tokens, each with
the whole vocabulary, and backward computes the logits again in blocks of the vocabulary, each with all tokens. Every
row of the weight's gradient is therefore one matrix product, rounded once, and no other tensor of its size exists.

Ranks may share the vocabulary (the vocabulary-parallel cross entropy of Megatron-LM, Shoeybi et al. 2019, section 3);
no rank then sees a whole row of logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from enginehouse_torch.modeling.sizes import BLOCK, SCORED_AT_ONCE_ELSEWHERE

if TYPE_CHECKING:
    from enginehouse.engines.train import Outputs

SCORED_AT_ONCE = {"cpu": 1 << 17}
"""Number of logits of a block that are scored at once, by device type. On a CPU they take half a MiB, which fits a
core's cache."""

NO_SHARE = -128.0
"""A logarithm whose exponential is 0 in float32; it replaces -inf, which times 0 would be nan."""


@dataclass(frozen=True, slots=True)
class Split:
    """A rank's part of a vocabulary that ranks share.

    Attributes:
        first: token id of the first row of this rank's weight.
        tokens: number of rows that stand for a token, may be 0; all other rows are padding and get a gradient of 0.
        group: the ranks.
    """

    first: int
    tokens: int
    group: dist.ProcessGroup


def scores(
    states: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    outputs: Outputs,
    split: Split | None = None,
) -> torch.Tensor:
    """Return logprobs of `targets`, and entropies in nats if `outputs` asks for them; differentiable.

    Matrix products have the dtype of `states`, all else is float32.

    Args:
        states: `(tokens, hidden)`, or the logits if `weight` is None.
        weight: weight of the head, `(vocabulary, hidden)`; None: `states` are the logits, `(tokens, vocabulary)`.
        bias: bias of the head, `(vocabulary,)`, or None.
        targets: int64 `(tokens,)`.
        outputs: temperature, and whether entropies are computed and have a gradient.
        split: this rank's part of the vocabulary, which `weight` and `bias` belong to. All ranks then call together
            with the same `states` and `targets` and get the same gradient. None: not split.

    Returns:
        float32 `(tokens, 1)`, or `(tokens, 2)` with the entropies.
    """
    result: torch.Tensor = _Scores.apply(states, weight, bias, targets, outputs, split)
    return result


def score_columns(values: torch.Tensor, outputs: Outputs) -> dict[str, torch.Tensor]:
    """Return the columns of `scores` for `outputs` by name, each float32 `(tokens,)`."""
    logprobs, *entropy = values.unbind(-1)
    columns = {"logprobs": logprobs} if outputs.logprobs else {}
    if outputs.entropy:
        columns["entropy"] = entropy[0] if outputs.entropy_gradient else entropy[0].detach()
    return columns


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        outputs: Outputs,
        split: Split | None,
    ) -> torch.Tensor:
        token_weight = None if weight is None else _token_rows(weight, split)
        token_bias = None if bias is None else _token_rows(bias, split)
        columns = states.shape[1] if token_weight is None else len(token_weight)
        whole = token_weight is None or len(states) * columns <= BLOCK
        stats = torch.zeros((4, len(states)), dtype=torch.float32, device=states.device)
        kept_logits = None
        for rows in _cut(len(states), len(states) if whole else _block_size(columns)):
            logits = _logits(states[rows], token_weight, token_bias, outputs.temperature)
            column = targets[rows] if split is None else _find_columns(targets[rows], split.first, columns)[0]
            for part in _cut_rows(logits):
                _measure(logits[part], column[part], stats[:, rows][:, part], outputs.entropy)
            kept_logits = logits if whole else None
            del logits
        if split is not None:
            _join_ranks(stats, targets, split, columns)
        largest, total, chosen, weighted = stats
        logs = total.log()
        entropy = logs - weighted / total if outputs.entropy else None
        if weight is None:  # only their dtype is needed
            states = states[:0]
        ctx.save_for_backward(states, weight, bias, targets, largest + logs, entropy, kept_logits)
        ctx.outputs, ctx.split = outputs, split
        return torch.stack([chosen - logs] if entropy is None else [chosen - logs, entropy], dim=-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slopes: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        states, weight, bias, targets, normaliser, entropy, kept_logits = ctx.saved_tensors
        outputs: Outputs = ctx.outputs
        split: Split | None = ctx.split
        state = _BackwardState(
            targets, normaliser, entropy if outputs.entropy_gradient else None, slopes / outputs.temperature
        )
        if weight is None:
            return state.gradient(kept_logits, None, torch.empty_like(kept_logits)).to(states.dtype), *[None] * 5
        token_weight, token_bias = _token_rows(weight, split), None if bias is None else _token_rows(bias, split)
        needed = ctx.needs_input_grad
        states_gradient = None
        weight_gradient = _empty_gradient(weight, split) if needed[1] else None
        bias_gradient = _empty_gradient(bias, split) if needed[2] else None
        for columns in _cut(len(token_weight), _block_size(len(states)) if kept_logits is None else len(token_weight)):
            if kept_logits is None:
                block_bias = None if token_bias is None else token_bias[columns]
                block = _logits(states, token_weight[columns], block_bias, outputs.temperature)
                first = columns.start if split is None else split.first + columns.start
                block = state.gradient(block, first, block).to(states.dtype)
            else:
                first = None if split is None else split.first
                block = state.gradient(kept_logits, first, torch.empty_like(kept_logits)).to(states.dtype)
            if needed[0]:
                product = block @ token_weight[columns]
                states_gradient = product if kept_logits is not None else _accumulate(states_gradient, product)
                del product
            if weight_gradient is not None:
                torch.mm(block.t(), states, out=weight_gradient[columns])
            if bias_gradient is not None:
                bias_gradient[columns] = block.sum(0)
            del block
        if states_gradient is not None:
            states_gradient = states_gradient.to(states.dtype)
            if split is not None:
                dist.all_reduce(states_gradient, group=split.group)
        return states_gradient, weight_gradient, bias_gradient, None, None, None


@dataclass(frozen=True, slots=True)
class _BackwardState:
    """Per-token results of the forward pass that the backward pass needs.

    Attributes:
        targets: int64 ids.
        normaliser: logarithms of the sums of exponentials.
        entropy: entropies; None: they have no gradient.
        slopes: `(tokens, 1 or 2)`, the gradient with respect to logprobs and entropies, divided by the temperature.
    """

    targets: torch.Tensor
    normaliser: torch.Tensor
    entropy: torch.Tensor | None
    slopes: torch.Tensor

    def gradient(self, logits: torch.Tensor, first: int | None, into: torch.Tensor) -> torch.Tensor:
        """Compute the gradient of some columns of the logits.

        Args:
            logits: float32 `(tokens, columns)`, divided by the temperature.
            first: id of the first column's token; None: every token has a column.
            into: written to and returned; may be `logits`.
        """
        column, slope = self.targets, self.slopes[:, 0]
        chosen = slope
        if first is not None:
            column, inside = _find_columns(self.targets, first, logits.shape[1])
            chosen = torch.where(inside, slope, 0.0)
        for rows in _cut_rows(logits):
            part = torch.sub(logits[rows], self.normaliser[rows, None], out=into[rows])
            part.exp_().mul_(-slope[rows, None]) if self.entropy is None else self._with_entropy(part, rows)
            if part.shape[1]:
                part.scatter_add_(-1, column[rows, None], chosen[rows, None])
        return into

    def _with_entropy(self, part: torch.Tensor, rows: slice) -> None:
        """Replace the log-probabilities of some rows by the gradient, without the terms at the targets' columns."""
        assert self.entropy is not None
        factor = part.clamp(min=NO_SHARE).add_(self.entropy[rows, None])
        factor.mul_(self.slopes[rows, 1:]).add_(self.slopes[rows, :1])
        part.exp_().mul_(factor.neg_())


def _logits(
    states: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, temperature: float
) -> torch.Tensor:
    """Return float32 logits, divided by the temperature."""
    if weight is None:
        return states.float() if temperature == 1.0 else states.float() / temperature
    logits = torch.nn.functional.linear(states, weight, bias).float()
    return logits if temperature == 1.0 else logits.div_(temperature)


def _measure(logits: torch.Tensor, column: torch.Tensor, stats: torch.Tensor, with_entropy: bool) -> None:
    """Measure the distribution of each row of `logits`, float32 `(tokens, columns)`.

    Args:
        logits: not changed.
        column: int64 `(tokens,)`, the column of each target.
        stats: `(4, tokens)`, the output. Its first row has the largest logit, which is subtracted from all logits. The
            other rows have the sum of the exponentials, the target's logit, and the sum of the logits weighted by their
            exponentials.
        with_entropy: False: the last row of `stats` stays 0.
    """
    lowest = torch.finfo(logits.dtype).min
    if not logits.shape[1]:
        stats[0] = lowest
        return
    largest = logits.amax(-1, keepdim=True).clamp_(min=lowest)
    above = logits - largest
    shares = above.exp()
    stats[0] = largest[:, 0]
    stats[1] = shares.sum(-1)
    stats[2] = above.gather(-1, column[:, None])[:, 0]
    if with_entropy:
        stats[3] = shares.mul_(above.clamp_(min=NO_SHARE)).sum(-1)


def _join_ranks(stats: torch.Tensor, targets: torch.Tensor, split: Split, columns: int) -> None:
    """Combine the ranks' statistics into statistics of all columns; collective."""
    largest, total, chosen, weighted = stats
    own = largest.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=split.group)
    lower = own - largest
    _, inside = _find_columns(targets, split.first, columns)
    # torch.where instead of a product, because a logit of another token may be infinite.
    chosen.copy_(torch.where(inside, chosen + lower, 0.0))
    factor = lower.exp()
    weighted.add_(lower * total).mul_(factor)
    total.mul_(factor)
    dist.all_reduce(stats[1:], group=split.group)


def _find_columns(targets: torch.Tensor, first: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the targets' columns, counted from token `first`, and a mask of the targets that have a column. All other
    targets get column 0."""
    column = targets - first
    inside = (column >= 0) & (column < columns)
    return torch.where(inside, column, 0), inside


def _token_rows(rows: torch.Tensor, split: Split | None) -> torch.Tensor:
    """Return the rows of a weight or bias that stand for tokens."""
    return rows if split is None else rows[: split.tokens]


def _empty_gradient(rows: torch.Tensor, split: Split | None) -> torch.Tensor:
    """Allocate the gradient of a weight or bias, 0 for padding."""
    gradient = torch.empty_like(rows)
    if split is not None:
        gradient[split.tokens :] = 0
    return gradient


def _accumulate(total: torch.Tensor | None, term: torch.Tensor) -> torch.Tensor:
    """Add a term to a float32 sum; None: the sum has no terms yet."""
    return term.float() if total is None else total.add_(term)


def _cut(length: int, each: int) -> Iterator[slice]:
    """Cut `length` into parts of size `each`. There is at least one part, which may be empty."""
    each = max(1, each)
    return (slice(begin, min(begin + each, length)) for begin in range(0, max(1, length), each))


def _block_size(other: int) -> int:
    """Return the number of rows that fit a block of `other` columns, or of columns that fit a block of `other` rows.

    It is a multiple of 64 if more than 64 fit.
    """
    most = max(1, BLOCK // max(1, other))
    return most - most % 64 if most > 64 else most


def _cut_rows(logits: torch.Tensor) -> Iterator[slice]:
    """Cut the rows of logits into slices that are scored at once."""
    elements = SCORED_AT_ONCE.get(logits.device.type, SCORED_AT_ONCE_ELSEWHERE)
    return _cut(len(logits), elements // max(1, logits.shape[-1]))
