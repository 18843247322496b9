"""Logprobs and entropies from hidden states and the weight of a language model's head, a block of logits at a time.

Logits that are one block are kept for the backward pass. Of more, none are: forward computes blocks of tokens, each
with its whole vocabulary; backward computes them again in blocks of the vocabulary, each with all tokens, so that every
row of the weight's gradient is one matrix product, rounded once, and nothing of its size stands beside it.

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
"""Logits of a block that are scored at once, by device type: on a CPU half a MiB, which a core's own cache holds."""

NO_SHARE = -128.0
"""A logarithm whose exponential is 0 in float32; stands for that of -inf, which times 0 would be nan."""


@dataclass(frozen=True, slots=True)
class Split:
    """A rank's part of a vocabulary that ranks share.

    Attributes:
        first: id of the token of the first row of this rank's weight.
        tokens: how many rows stand for a token, may be 0; the rest is padding and gets a gradient of 0.
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
    """Logprobs of `targets`, and entropies in nats where `outputs` has them; differentiable.

    Products of matrices are of the dtype of `states`, all else is float32.

    Args:
        states: `(tokens, hidden)`; or, without a weight, the logits.
        weight: `(vocabulary, hidden)`, the head's; None: `states` are the logits, `(tokens, vocabulary)`.
        bias: `(vocabulary,)`, the head's; None: it has none.
        targets: int64 `(tokens,)`.
        outputs: temperature, and whether entropies are asked for and have a gradient.
        split: what `weight` and `bias` are of, on ranks that share the vocabulary, and call together with the same
            `states` and `targets`, which get the same gradient; None: of all.

    Returns:
        float32 `(tokens, 1)`, or `(tokens, 2)` with the entropies.
    """
    found: torch.Tensor = _Scores.apply(states, weight, bias, targets, outputs, split)
    return found


def score_columns(found: torch.Tensor, outputs: Outputs) -> dict[str, torch.Tensor]:
    """What `scores` gave for `outputs`, by name, each float32 `(tokens,)`."""
    logprobs, *entropy = found.unbind(-1)
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
        used = None if weight is None else _token_rows(weight, split)
        used_bias = None if bias is None else _token_rows(bias, split)
        columns = states.shape[1] if used is None else len(used)
        whole = used is None or len(states) * columns <= BLOCK
        figures = torch.zeros((4, len(states)), dtype=torch.float32, device=states.device)
        kept = None
        for rows in _cut(len(states), len(states) if whole else _block_size(columns)):
            logits = _logits(states[rows], used, used_bias, outputs.temperature)
            column = targets[rows] if split is None else _find_columns(targets[rows], split.first, columns)[0]
            for some in _cut_rows(logits):
                _measure(logits[some], column[some], figures[:, rows][:, some], outputs.entropy)
            kept = logits if whole else None
            del logits
        if split is not None:
            _join_ranks(figures, targets, split, columns)
        largest, total, chosen, weighted = figures
        logs = total.log()
        entropy = logs - weighted / total if outputs.entropy else None
        if weight is None:  # only their dtype is needed
            states = states[:0]
        ctx.save_for_backward(states, weight, bias, targets, largest + logs, entropy, kept)
        ctx.outputs, ctx.split = outputs, split
        return torch.stack([chosen - logs] if entropy is None else [chosen - logs, entropy], dim=-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slopes: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        states, weight, bias, targets, normaliser, entropy, kept = ctx.saved_tensors
        outputs: Outputs = ctx.outputs
        split: Split | None = ctx.split
        going = _BackwardState(
            targets, normaliser, entropy if outputs.entropy_gradient else None, slopes / outputs.temperature
        )
        if weight is None:
            return going.gradient(kept, None, torch.empty_like(kept)).to(states.dtype), *[None] * 5
        used, used_bias = _token_rows(weight, split), None if bias is None else _token_rows(bias, split)
        wanted = ctx.needs_input_grad
        of_states = None
        of_weight = _empty_gradient(weight, split) if wanted[1] else None
        of_bias = _empty_gradient(bias, split) if wanted[2] else None
        for columns in _cut(len(used), _block_size(len(states)) if kept is None else len(used)):
            if kept is None:
                own_bias = None if used_bias is None else used_bias[columns]
                block = _logits(states, used[columns], own_bias, outputs.temperature)
                first = columns.start if split is None else split.first + columns.start
                block = going.gradient(block, first, block).to(states.dtype)
            else:
                first = None if split is None else split.first
                block = going.gradient(kept, first, torch.empty_like(kept)).to(states.dtype)
            if wanted[0]:
                product = block @ used[columns]
                of_states = product if kept is not None else _accumulate(of_states, product)
                del product
            if of_weight is not None:
                torch.mm(block.t(), states, out=of_weight[columns])
            if of_bias is not None:
                of_bias[columns] = block.sum(0)
            del block
        if of_states is not None:
            of_states = of_states.to(states.dtype)
            if split is not None:
                dist.all_reduce(of_states, group=split.group)
        return of_states, of_weight, of_bias, None, None, None


@dataclass(frozen=True, slots=True)
class _BackwardState:
    """What going back takes of the way there, a token an entry.

    Attributes:
        targets: int64 ids.
        normaliser: logarithms of the sums of exponentials.
        entropy: entropies; None: they have no gradient.
        slopes: `(tokens, 1 or 2)`, the gradient of logprobs and entropies, divided by the temperature.
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
            into: what it is written to, and returned; may be `logits`.
        """
        column, slope = self.targets, self.slopes[:, 0]
        chosen = slope
        if first is not None:
            column, here = _find_columns(self.targets, first, logits.shape[1])
            chosen = torch.where(here, slope, 0.0)
        for rows in _cut_rows(logits):
            part = torch.sub(logits[rows], self.normaliser[rows, None], out=into[rows])
            part.exp_().mul_(-slope[rows, None]) if self.entropy is None else self._with_entropy(part, rows)
            if part.shape[1]:
                part.scatter_add_(-1, column[rows, None], chosen[rows, None])
        return into

    def _with_entropy(self, part: torch.Tensor, rows: slice) -> None:
        """Make of the log-probabilities of some rows the gradient, but for what the targets add."""
        assert self.entropy is not None
        factor = part.clamp(min=NO_SHARE).add_(self.entropy[rows, None])
        factor.mul_(self.slopes[rows, 1:]).add_(self.slopes[rows, :1])
        part.exp_().mul_(factor.neg_())


def _logits(
    states: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, temperature: float
) -> torch.Tensor:
    """Logits, float32, divided by the temperature."""
    if weight is None:
        return states.float() if temperature == 1.0 else states.float() / temperature
    logits = torch.nn.functional.linear(states, weight, bias).float()
    return logits if temperature == 1.0 else logits.div_(temperature)


def _measure(logits: torch.Tensor, column: torch.Tensor, figures: torch.Tensor, with_entropy: bool) -> None:
    """Measure the distribution of each row of `logits`, float32 `(tokens, columns)`.

    Args:
        logits: they stay as they are.
        column: int64 `(tokens,)`, the target's.
        figures: `(4, tokens)`, written: the largest logit; of the logits above it the sum of exponentials, the
            target's, and their sum weighted by their exponentials, which is left at 0 without the entropy.
        with_entropy: whether the last is asked for.
    """
    lowest = torch.finfo(logits.dtype).min
    if not logits.shape[1]:
        figures[0] = lowest
        return
    largest = logits.amax(-1, keepdim=True).clamp_(min=lowest)
    above = logits - largest
    shares = above.exp()
    figures[0] = largest[:, 0]
    figures[1] = shares.sum(-1)
    figures[2] = above.gather(-1, column[:, None])[:, 0]
    if with_entropy:
        figures[3] = shares.mul_(above.clamp_(min=NO_SHARE)).sum(-1)


def _join_ranks(figures: torch.Tensor, targets: torch.Tensor, split: Split, columns: int) -> None:
    """Make each rank's figures those of all columns; collective."""
    largest, total, chosen, weighted = figures
    own = largest.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=split.group)
    lower = own - largest
    _, here = _find_columns(targets, split.first, columns)
    # Where, not a product: a logit of another token may be infinite.
    chosen.copy_(torch.where(here, chosen + lower, 0.0))
    factor = lower.exp()
    weighted.add_(lower * total).mul_(factor)
    total.mul_(factor)
    dist.all_reduce(figures[1:], group=split.group)


def _find_columns(targets: torch.Tensor, first: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the targets are in columns that begin with the token `first`, and whether: those that are not are at 0."""
    column = targets - first
    here = (column >= 0) & (column < columns)
    return torch.where(here, column, 0), here


def _token_rows(rows: torch.Tensor, split: Split | None) -> torch.Tensor:
    """The rows of a weight or bias that stand for tokens."""
    return rows if split is None else rows[: split.tokens]


def _empty_gradient(rows: torch.Tensor, split: Split | None) -> torch.Tensor:
    """Room for the gradient of a weight or bias, 0 for padding."""
    gradient = torch.empty_like(rows)
    if split is not None:
        gradient[split.tokens :] = 0
    return gradient


def _accumulate(total: torch.Tensor | None, term: torch.Tensor) -> torch.Tensor:
    """A sum that is kept in float32; None: there is none yet."""
    return term.float() if total is None else total.add_(term)


def _cut(length: int, each: int) -> Iterator[slice]:
    """Cut `length` into parts of `each`; one at least, which may be empty."""
    each = max(1, each)
    return (slice(begin, min(begin + each, length)) for begin in range(0, max(1, length), each))


def _block_size(other: int) -> int:
    """Rows or columns of a block that has `other` of the other; whole tiles of a GPU's matrix products, if several."""
    most = max(1, BLOCK // max(1, other))
    return most - most % 64 if most > 64 else most


def _cut_rows(logits: torch.Tensor) -> Iterator[slice]:
    """The rows of logits, cut into those that are scored at once."""
    elements = SCORED_AT_ONCE.get(logits.device.type, SCORED_AT_ONCE_ELSEWHERE)
    return _cut(len(logits), elements // max(1, logits.shape[-1]))
