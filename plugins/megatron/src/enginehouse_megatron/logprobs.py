"""Logprobs and entropy of tokens whose logits are split over ranks by the vocabulary; no rank sees a whole row.

The vocabulary-parallel cross entropy of Megatron-LM (Shoeybi et al. 2019, section 3), with the entropy beside it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def split_logprobs(
    logits: torch.Tensor,
    targets: torch.Tensor,
    first: int,
    group: dist.ProcessGroup,
    *,
    entropy: bool,
    entropy_gradient: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logprobs of `targets`, and the entropy of each distribution in nats where asked for; collective, differentiable.

    Args:
        logits: `(tokens, columns)` float32, this rank's columns; may have none. Overwritten.
        targets: `(tokens,)` int64 token ids, the same on every rank.
        first: id of the token of this rank's first column.
        group: the ranks that share the vocabulary.
        entropy: whether to compute it.
        entropy_gradient: whether it has a gradient, which costs as much memory as the logits.

    Returns:
        Two float32 `(tokens,)`, or the first and None.
    """
    logprobs, found = _SplitLogprobs.apply(logits, targets, first, group, entropy, entropy and entropy_gradient)
    return logprobs, found if entropy else None


class _SplitLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        first: int,
        group: dist.ProcessGroup,
        entropy: bool,
        entropy_gradient: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, columns = logits.shape
        lowest = torch.finfo(logits.dtype).min
        if columns:
            largest = logits.max(dim=1).values.clamp(min=lowest)
        else:
            largest = logits.new_full((tokens,), lowest)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        shifted = logits.sub_(largest[:, None])
        here = (targets >= first) & (targets < first + columns)
        column = torch.where(here, targets - first, 0)
        exponential = shifted.exp()
        sums = logits.new_zeros(3, tokens)
        sums[0] = exponential.sum(1)
        if columns:
            # Where, not a product: a logit of another token may be infinite.
            sums[1] = torch.where(here, shifted.gather(1, column[:, None])[:, 0], 0.0)
        if entropy:
            sums[2] = (exponential * shifted.clamp(min=lowest)).sum(1)
        dist.all_reduce(sums, group=group)
        total, chosen, weighted = sums
        normaliser = total.log()
        probabilities = exponential.div_(total[:, None])
        mean = weighted / total
        ctx.save_for_backward(probabilities, here, column, shifted if entropy_gradient else None, mean)
        found = normaliser - mean
        if not entropy_gradient:
            ctx.mark_non_differentiable(found)
        return chosen - normaliser, found

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        of_logprobs, of_entropy = gradients
        probabilities, here, column, shifted, mean = ctx.saved_tensors
        gradient = probabilities * -of_logprobs[:, None]
        if probabilities.shape[1]:
            gradient.scatter_add_(1, column[:, None], (of_logprobs * here)[:, None])
        if shifted is not None:
            lowest = torch.finfo(shifted.dtype).min
            apart = shifted.clamp(min=lowest) - mean[:, None]
            gradient -= probabilities * apart * of_entropy[:, None]
        return gradient, None, None, None, None, None
