"""Logits at the positions that are needed, and at no others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from enginehouse_megatron import kernels  # noqa: F401  before all else of megatron-core

# isort: split
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig


def select_positions(model: GPTModel, settings: TransformerConfig) -> None:
    """Give the output layer the positions that `only_at` names, of all ranks that share a sequence's tokens.

    It then has whole rows of the hidden state, as without sequence parallelism, though far fewer of them.
    """
    layer = getattr(model, "output_layer", None)
    if layer is None:
        return
    gathers = settings.sequence_parallel
    layer.sequence_parallel = False
    layer.allreduce_dgrad = settings.tensor_model_parallel_size > 1

    def select(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden, *rest = args
        if gathers:
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=parallel_state.get_tensor_model_parallel_group()
            )
        return (hidden[model.needed_positions], *rest)

    layer.register_forward_pre_hook(select)


@contextlib.contextmanager
def only_at(model: GPTModel, positions: torch.Tensor) -> Iterator[None]:
    """Within, the model's output has the shape `(1, positions, ...)`.

    Args:
        model: on whichever stage.
        positions: int64 `(positions,)`, of this rank's tokens.
    """
    model.needed_positions = positions
    try:
        yield
    finally:
        del model.needed_positions
