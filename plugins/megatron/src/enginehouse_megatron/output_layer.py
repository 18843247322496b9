"""Changes a `GPTModel`: the output layer computes only needed positions, and the padding token gets no gradient."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig


def select_positions(model: GPTModel, settings: TransformerConfig) -> None:
    """Give the output layer only the hidden states at the positions that `only_at` names.

    With sequence parallelism, the hidden states are first gathered from the ranks that share a sequence's tokens.
    """
    if not model.post_process:
        return
    gathers = settings.sequence_parallel

    def select(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden, *further = args
        if gathers:
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=parallel_state.get_tensor_model_parallel_group()
            )
        return (hidden[model.needed_positions], *further)

    model.output_layer.register_forward_pre_hook(select)


def keep_padding(model: GPTModel, padding: int | None) -> None:
    """Give the embedding of the token `padding` no gradient where it is looked up, as `torch.nn.Embedding` does.

    A policy may sample that token. Its embedding is often zero, where a norm's gradient is so large that one such token
    would decide a step's direction.
    """
    if not model.pre_process or padding is None:
        return
    group = parallel_state.get_tensor_model_parallel_group()

    def keep(module: torch.nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        (ids,) = args
        if module.reduce_scatter_embeddings:  # `(tokens of this rank, batch, hidden)`; else batch first
            ids = ids.t().chunk(group.size())[group.rank()]
        return torch.where((ids == padding)[..., None], output.detach(), output)

    model.embedding.word_embeddings.register_forward_hook(keep)


class ValueHead(torch.nn.Linear):
    """A value head in place of a `GPTModel`'s output layer, whole and the same on every rank that splits matrices."""

    def forward(self, hidden: torch.Tensor, weight: object = None, runtime_gather_output: object = None) -> tuple:
        """Return values, `(positions, batch, 1)`, and no bias."""
        return super().forward(hidden), None


def put_value_head(model: GPTModel, settings: TransformerConfig, device: object) -> None:
    """Let the last stage return values, `(1, positions, 1)`, instead of logits."""
    if model.post_process:
        model.output_layer = ValueHead(settings.hidden_size, 1, bias=False, dtype=settings.params_dtype, device=device)


@contextlib.contextmanager
def only_at(
    model: GPTModel,
    positions: torch.Tensor,
    score: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None,
) -> Iterator[None]:
    """Have the model return `(1, positions, ...)` within the `with` statement.

    Args:
        model: The model, on any stage.
        positions: Positions among this rank's tokens, int64 `(positions,)`.
        score: Computes the output layer's result, `(positions, columns)`, from hidden states, `(positions, hidden)`,
            and the layer's weight; None keeps the layer's own result, such as values.
    """
    layer = model.output_layer if model.post_process and score is not None else None

    def compute(
        hidden: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: object = None
    ) -> tuple:
        assert layer is not None
        assert score is not None
        return score(hidden[:, 0], layer.weight if weight is None else weight)[:, None], None

    model.needed_positions = positions
    if layer is not None:
        layer.forward = compute
    try:
        yield
    finally:
        del model.needed_positions
        if layer is not None:
            del layer.forward  # the class's forward is used again
