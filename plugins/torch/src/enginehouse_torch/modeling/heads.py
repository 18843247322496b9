"""From input tokens to per-token outputs: log-probabilities, entropy, values. Works on any Hugging Face causal LM."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch.autograd.function import once_differentiable

from enginehouse.errors import EnginehouseError
from enginehouse_torch.modeling.loading import VALUE_HEAD

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from enginehouse.engines.train import Outputs
    from enginehouse_torch.modeling.packing import Layout


SCORED_AT_ONCE = {"cpu": 1 << 17}
"""Logits that are scored at once, by device type: on a CPU half a MiB, which a core's own cache holds."""
SCORED_AT_ONCE_ELSEWHERE = 1 << 26


def check_outputs(has_values: bool, outputs: Outputs) -> None:
    """Raise EnginehouseError if a model's head, a value head or not, cannot give `outputs`."""
    if outputs.values and not has_values:
        raise EnginehouseError('values were asked of a model without a value head; set ModelSpec(head="value")')
    if has_values and (outputs.logprobs or outputs.entropy):
        raise EnginehouseError(
            "logprobs or entropy were asked of a model with a value head; ask for "
            'Outputs(logprobs=False, values=True), or set ModelSpec(head="causal_lm")'
        )
    if not outputs.temperature > 0:
        raise EnginehouseError(f"temperature is {outputs.temperature}; logprobs need a temperature above 0")


@dataclass(frozen=True, slots=True)
class ModelInput:
    """A layout as tensors on the model's device.

    Attributes:
        ids: int64 `(sequences, length)`.
        positions: int64 `(sequences, length)`; None: each sequence counts from 0.
        allowed: bool `(sequences, 1, length, length)`, which position attends to which; None: causal.
        predictor: int64 `(tokens,)`, the flat input position that predicts each needed token.
        targets: int64 `(tokens,)`, the ids of the needed tokens.
    """

    ids: torch.Tensor
    positions: torch.Tensor | None
    allowed: torch.Tensor | None
    predictor: torch.Tensor
    targets: torch.Tensor

    @classmethod
    def of(cls, layout: Layout, ids: npt.NDArray[np.int64], device: torch.device) -> ModelInput:
        """Read the tokens of `layout` from the batch's flat `ids`."""

        def tensor(array: npt.NDArray) -> torch.Tensor:
            return torch.from_numpy(array).to(device, non_blocking=True)

        allowed = layout.attention_allowed()
        return cls(
            ids=tensor(ids[layout.tokens]),
            positions=None if allowed is None else tensor(layout.positions),
            allowed=None if allowed is None else tensor(allowed),
            predictor=tensor(layout.predictor),
            targets=tensor(ids[layout.needed]),
        )


def token_outputs(model: PreTrainedModel, model_input: ModelInput, outputs: Outputs) -> dict[str, torch.Tensor]:
    """Run the model and compute `outputs` for the needed tokens, differentiably.

    The model has a value head if values are asked for, and none otherwise (`check_outputs`).

    Returns:
        The columns asked for, each float32 `(tokens,)`.
    """
    inputs = {"input_ids": model_input.ids, "attention_mask": model_input.allowed, "use_cache": False}
    if model_input.positions is not None:
        inputs["position_ids"] = model_input.positions
    if outputs.values:
        hidden = model.base_model(**inputs).last_hidden_state.flatten(0, 1)
        value_head = model.get_submodule(VALUE_HEAD)
        return {"values": value_head(hidden[model_input.predictor]).squeeze(-1).float()}
    with _logits_only_at(model, model_input.predictor):
        logits = model(**inputs).logits.squeeze(0).float()
    if outputs.temperature != 1.0:
        logits = logits / outputs.temperature
    if outputs.logprobs and not (outputs.entropy and outputs.entropy_gradient):
        logprobs, entropy = Scores.apply(logits, model_input.targets, outputs.entropy)
        return {"logprobs": logprobs, "entropy": entropy} if outputs.entropy else {"logprobs": logprobs}
    normaliser = torch.logsumexp(logits, dim=-1)
    found = {}
    if outputs.logprobs:
        found["logprobs"] = logits.gather(-1, model_input.targets[:, None]).squeeze(-1) - normaliser
    if outputs.entropy:
        # A masked logit of -inf has probability 0 and adds nothing, not nan.
        found["entropy"] = normaliser - (torch.softmax(logits, dim=-1) * logits.clamp(min=torch.finfo().min)).sum(-1)
    return found


class Scores(torch.autograd.Function):
    """Logprobs of the targets, and the entropy without a gradient: some tokens at a time, which stay in a cache.

    Of the size of the logits, nothing is kept but the logits themselves.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, with_entropy: bool):
        """Score each token.

        Args:
            ctx: autograd's.
            logits: float32 `(tokens, vocabulary)`.
            targets: int64 `(tokens,)`.
            with_entropy: whether to measure the entropy.

        Returns:
            Logprobs and entropies in nats, both float32 `(tokens,)`; None for what is not measured.
        """
        logprobs, normaliser = torch.empty_like(targets, dtype=logits.dtype), logits.new_empty(len(logits), 1)
        entropy = torch.empty_like(logprobs) if with_entropy else None
        for rows in _slices(logits):
            largest = logits[rows].amax(-1, keepdim=True)
            above = logits[rows] - largest
            shares = above.exp()
            total = shares.sum(-1, keepdim=True)
            logs = total.log()
            logprobs[rows] = (above.gather(-1, targets[rows, None]) - logs)[:, 0]
            normaliser[rows] = largest + logs
            if entropy is not None:
                # A masked logit of -inf has probability 0 and adds nothing, not nan.
                above.clamp_(min=torch.finfo(above.dtype).min)
                entropy[rows] = (logs - torch.linalg.vecdot(shares, above)[:, None] / total)[:, 0]
        ctx.save_for_backward(logits, targets, normaliser)
        if entropy is not None:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: torch.Tensor, _: object):
        """The gradient of the logits: of each token `slope * (one-hot target - probabilities)`."""
        logits, targets, normaliser = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        for rows in _slices(logits):
            part = torch.sub(logits[rows], normaliser[rows], out=gradient[rows])
            part.exp_().mul_(-slope[rows, None])
            part.scatter_add_(-1, targets[rows, None], slope[rows, None])
        return gradient, None, None


def _slices(logits: torch.Tensor) -> Iterator[slice]:
    """Cut the tokens of `logits` into parts."""
    elements = SCORED_AT_ONCE.get(logits.device.type, SCORED_AT_ONCE_ELSEWHERE)
    each = max(1, elements // max(1, logits.shape[-1]))
    return (slice(begin, begin + each) for begin in range(0, len(logits), each))


@contextlib.contextmanager
def _logits_only_at(model: PreTrainedModel, predictor: torch.Tensor) -> Iterator[None]:
    """Within, the model's logits have shape `(1, tokens, vocabulary)`: those at the flat positions `predictor` alone.

    The model's own argument `logits_to_keep` selects the same positions in every sequence. Selecting what enters the
    output layer selects any, for every model, and leaves what a model does to its logits afterwards in place.
    """

    def select(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden, *rest = args
        return (hidden.flatten(0, 1)[predictor][None], *rest)

    # Before what splits the layer over ranks, which takes its input apart.
    hook = model.get_output_embeddings().register_forward_pre_hook(select, prepend=True)
    try:
        yield
    finally:
        hook.remove()
