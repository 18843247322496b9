"""Computes per-token outputs (log-probabilities, entropy, values) from tokens, for any Hugging Face causal LM."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from enginehouse.errors import EnginehouseError
from enginehouse_torch.modeling.holding import VALUE_HEAD
from enginehouse_torch.modeling.rotary import compute_rows_alone
from enginehouse_torch.modeling.scores import Split, score_columns, scores

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from enginehouse.engines.train import Outputs
    from enginehouse_torch.modeling.packing import TreeLayout


def check_outputs(has_values: bool, outputs: Outputs) -> None:
    """Raise EnginehouseError if a model with a value head, or without one, cannot compute `outputs`."""
    if outputs.values and not has_values:
        raise EnginehouseError('a model without a value head has no values; set ModelSpec(head="value")')
    if has_values and (outputs.logprobs or outputs.entropy):
        raise EnginehouseError(
            "a model with a value head has no logprobs or entropy; request "
            'Outputs(logprobs=False, values=True), or set ModelSpec(head="causal_lm")'
        )
    if not outputs.temperature > 0:
        raise EnginehouseError(f"temperature must be above 0 for logprobs, not {outputs.temperature}")


@dataclass(frozen=True, slots=True)
class ModelInput:
    """A layout as tensors on the model's device.

    Attributes:
        ids: int64 `(sequences, length)`.
        positions: int64 `(sequences, length)`; None: each sequence counts from 0.
        allowed: bool `(sequences, 1, length, length)`, the positions each position may attend to; None: causal.
        predictor: int64 `(tokens,)`, the flat input position that predicts each needed token.
        targets: int64 `(tokens,)`, the ids of the needed tokens.
        rows: equal to `TreeLayout.rows`.
    """

    ids: torch.Tensor
    positions: torch.Tensor | None
    allowed: torch.Tensor | None
    predictor: torch.Tensor
    targets: torch.Tensor
    rows: tuple[tuple[int, int], ...] | None = None

    @classmethod
    def from_layout(cls, layout: TreeLayout, ids: npt.NDArray[np.int64], device: torch.device) -> ModelInput:
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
            rows=layout.rows,
        )


def token_outputs(model: PreTrainedModel, model_input: ModelInput, outputs: Outputs) -> dict[str, torch.Tensor]:
    """Run the model and compute `outputs` for the needed tokens, differentiably.

    The model has a value head if and only if values are requested (`check_outputs`).

    Returns:
        The requested columns, each float32 `(tokens,)`.
    """
    with compute_rows_alone(model, model_input), _rows_count_from_zero(model_input):
        return _token_outputs(model, model_input, outputs)


@contextlib.contextmanager
def _rows_count_from_zero(model_input: ModelInput) -> Iterator[None]:
    """Tell transformers that each sequence holds a single row, if `model_input` has no positions.

    Otherwise transformers reads the positions from the device in each pass to find out, and waits for all earlier work.
    """
    from transformers import masking_utils

    ask = masking_utils.find_packed_sequence_indices
    if model_input.positions is None:
        masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = ask


def _token_outputs(model: PreTrainedModel, model_input: ModelInput, outputs: Outputs) -> dict[str, torch.Tensor]:
    inputs = {"input_ids": model_input.ids, "attention_mask": model_input.allowed, "use_cache": False}
    if model_input.positions is not None:
        inputs["position_ids"] = model_input.positions
    if outputs.values:
        hidden = model.base_model(**inputs).last_hidden_state.flatten(0, 1)
        value_head = model.get_submodule(VALUE_HEAD)
        return {"values": value_head(hidden[model_input.predictor]).squeeze(-1).float()}
    if _has_plain_head(model, model_input.ids):
        scored = functools.partial(_score, model.get_output_embeddings(), model_input.targets, outputs)
        with _select_positions(model, model_input.predictor, scored):
            values = model(**inputs).logits[0]
    else:
        with _select_positions(model, model_input.predictor):
            values = scores(model(**inputs).logits[0], None, None, model_input.targets, outputs)
    return score_columns(values, outputs)


def _score(head: torch.nn.Linear, targets: torch.Tensor, outputs: Outputs, hidden: torch.Tensor) -> torch.Tensor:
    """Return the result of `scores` for hidden states `(1, tokens, hidden)`, as `(1, tokens, 1 or 2)`.

    Replaces the head's `forward`, which would return logits. If the head's weight is a DTensor, the ranks split the
    vocabulary.
    """
    weight, bias = head.weight, head.bias
    if not isinstance(weight, DTensor):
        return torch.stack([scores(hidden[0], weight, bias, targets, outputs)])  # a copy, because FSDP warns of views
    mesh = weight.device_mesh
    whole, own, own_bias = (
        _local_part(hidden),
        _local_part(weight),
        None if bias is None else _local_part(bias),
    )
    split = Split(-(-len(weight) // mesh.size()) * mesh.get_local_rank(), len(own), mesh.get_group())
    values = scores(whole[0], own, own_bias, targets, outputs, split)
    return DTensor.from_local(torch.stack([values]), mesh, (Replicate(),), run_check=False)


def _local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor."""
    assert isinstance(tensor, DTensor)
    own: torch.Tensor = tensor.to_local()
    return own


_heads: weakref.WeakKeyDictionary[torch.nn.Module, bool] = weakref.WeakKeyDictionary()
"""Cached results of `_has_plain_head`."""


@torch.no_grad()
def _has_plain_head(model: PreTrainedModel, ids: torch.Tensor) -> bool:
    """Return True if the head is a linear layer whose logits the model returns unchanged, tried once on one token.

    The logits themselves are needed if the model scales, caps or masks them, or if the head has an adapter.
    """
    if model in _heads:
        return _heads[model]
    seen: list[torch.Tensor] = []
    plain = False

    def replace(head: torch.nn.Module, args: object, logits: torch.Tensor) -> torch.Tensor:
        nonlocal plain
        weight = head.weight
        by_tokens = not isinstance(weight, DTensor) or weight.placements == (Shard(0),)
        plain = type(head) is torch.nn.Linear and "forward" not in vars(head) and by_tokens
        seen.append(logits.float() + 0.0)  # a new tensor, already float32 in case the model converts its logits
        return seen[-1]

    hook = model.get_output_embeddings().register_forward_hook(replace)
    try:
        logits = model(input_ids=ids[:1, :1], use_cache=False).logits
    finally:
        hook.remove()
    untouched = len(seen) == 1 and logits is seen[0] and logits._version == 0
    _heads[model] = plain and untouched
    return _heads[model]


@contextlib.contextmanager
def _select_positions(
    model: PreTrainedModel, predictor: torch.Tensor, forward: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> Iterator[None]:
    """Within the block, pass the model's output layer only the hidden states at flat positions, `(1, tokens, hidden)`.

    The model's own argument `logits_to_keep` selects the same positions in every sequence. Selecting the input of the
    output layer works for any positions and every model, and keeps the model's own changes to its logits. If given,
    `forward` replaces the layer's own forward. It runs while the layer's weight is gathered.
    """

    def select(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden, *further = args
        return (hidden.flatten(0, 1)[predictor][None], *further)

    layer = model.get_output_embeddings()
    # Runs before the hooks that split the layer over ranks, which take its input apart.
    hook = layer.register_forward_pre_hook(select, prepend=True)
    if forward is not None:
        layer.forward = forward
    try:
        yield
    finally:
        hook.remove()
        if forward is not None:
            del layer.forward  # the class's forward is used again
