"""Runs a rank's part of a model over micro-batches with megatron-core's schedules, and turns tokens into outputs.

All stages of a pipeline, and all ranks that split a matrix or a sequence, cut the same batch in the same way, without
communication. Data-parallel ranks agree on the number of micro-batches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import unwrap_model

from enginehouse.data import Batch, Ragged
from enginehouse.engines.progress import note_progress
from enginehouse.engines.train import LossSpec, LossValue, Mean, Metrics, Outputs, merge_metrics
from enginehouse.plugin import plugins
from enginehouse_megatron.layers import find_positions, pack_parameters
from enginehouse_megatron.output_layer import only_at
from enginehouse_megatron.packing import Packed, make_padding, plan
from enginehouse_torch.modeling.heads import check_outputs
from enginehouse_torch.modeling.packing import BatchRows
from enginehouse_torch.modeling.ranks import Ranks
from enginehouse_torch.modeling.scores import Split, score_columns, scores
from enginehouse_torch.modeling.token_view import COLUMNS, token_ids, token_view

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

Step = Callable[[Packed, torch.Tensor], Any]
"""Processes a micro-batch and the model's output on the last stage. Returns the result to collect; with gradients, the
loss, a count of tokens and the result."""


@dataclass(eq=False, kw_only=True)
class StagePasses:
    """Forward and backward passes of one rank over its part of the model.

    Attributes:
        vocabulary: Number of tokens of the model's vocabulary.
        budget: Maximum number of tokens of a micro-batch, unless a single row is longer (`tokens_per_microbatch`).
        during: Entered around each pass, with a description of it (`MemoryGuard.during`).
    """

    settings: TransformerConfig
    vocabulary: int
    has_values: bool
    device: torch.device
    budget: int
    ranks: Ranks
    during: Callable[[str], AbstractContextManager[object]]

    def __post_init__(self) -> None:
        self._losses: dict[str, Callable[..., LossValue]] = {}
        self._tensor = parallel_state.get_tensor_model_parallel_group()
        self._context = parallel_state.get_context_parallel_group()
        self._is_last = parallel_state.is_pipeline_last_stage()
        context = self._context.size()
        self._each = 2 * context if context > 1 else 1
        self._whole = self._each * (self._tensor.size() if self.settings.sequence_parallel else 1)

    def forward(self, models: Sequence[torch.nn.Module], batch: Batch, outputs: Outputs) -> Batch | None:
        """Compute `outputs` without gradients; returns None unless this rank is on the last stage."""
        check_outputs(self.has_values, outputs)
        ids = token_ids(batch)
        parts = self._cut(batch)

        def step(packed: Packed, output: torch.Tensor) -> Any:
            return packed, self._build_columns(packed, output, outputs)

        with torch.no_grad():
            results = self._run(models, parts, ids, outputs, step, forward_only=True)
        if not self._is_last:
            return None
        columns = {name: torch.zeros(len(ids)) for name in COLUMNS if getattr(outputs, name)}
        for packed, values in results:  # after all were launched, because reading a result waits for the device
            for name, column in values.items():
                columns[name][torch.from_numpy(packed.needed)] = column.cpu()
        offsets = batch.ragged("input_ids").offsets
        return Batch({name: Ragged(values, offsets) for name, values in columns.items()})

    def forward_backward(
        self, models: Sequence[torch.nn.Module], batch: Batch, loss: LossSpec
    ) -> tuple[Metrics, float]:
        """Accumulate the gradient of the summed `loss`, computed only from the tokens of `loss_mask`.

        Returns:
            Metrics, and the weight of the loss. The summed loss divided by its weight is the mean loss. On other stages
            than the last, no metrics and 0.
        """
        check_outputs(self.has_values, loss.outputs)
        if loss.name not in self._losses:
            self._losses[loss.name] = plugins().function("loss", loss.name)
        function = self._losses[loss.name]
        metrics: list[Metrics] = []
        weights: list[float] = []

        def step(packed: Packed, output: torch.Tensor) -> Any:
            values = self._build_columns(packed, output, loss.outputs)
            # The loss may not depend on the columns, but the other stages wait for a gradient.
            total = 0.0 * sum(column.sum() for column in values.values())
            if packed.rows is not None:
                with self.during(f"computing the loss {(loss.wraps or loss.name)!r} of {len(packed.rows)} rows"):
                    view = token_view(batch, packed.rows, packed.needed, values, loss.outputs, self.device)
                    value = function(view, **loss.arguments)
                weights.append(value.weight)
                metrics.append({**value.metrics, "loss": Mean(value.total.item(), value.weight)})
                total = total + value.total.to(self.device)
            # megatron-core's count of tokens is 0, because the step divides gradients by the loss's weight.
            return total, torch.zeros((), dtype=torch.int), {}

        self._run(models, self._cut(batch), token_ids(batch), loss.outputs, step, forward_only=False)
        return merge_metrics(metrics), sum(weights)

    def _cut(self, batch: Batch) -> list[Packed]:
        """Cut the batch into as many micro-batches as on every other rank, at least one."""
        mask = batch.ragged("loss_mask").values.cpu().numpy() if "loss_mask" in batch else None
        rows = BatchRows.from_offsets(batch.ragged("input_ids").offsets.numpy(), mask)
        parts = plan(rows, self.budget, each=self._each, whole=self._whole)
        most = self.ranks.largest(max(len(parts), 1))
        if self.settings.virtual_pipeline_model_parallel_size is not None:  # the schedule needs a multiple of this size
            most += -most % self.settings.pipeline_model_parallel_size
        return [*parts, *[make_padding(self._whole)] * (most - len(parts))]

    def _run(
        self,
        models: Sequence[torch.nn.Module],
        parts: Sequence[Packed],
        ids: np.ndarray,
        outputs: Outputs,
        step: Step,
        *,
        forward_only: bool,
    ) -> list[Any]:
        """Run micro-batches of a batch with flat token ids `ids` through the pipeline.

        Returns:
            What `step` collected, one entry per micro-batch; on other stages than the last, nothing.
        """

        def forward_step(coming: Iterator[Packed], model: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
            packed = next(coming)
            with self.during(
                f"computing a forward pass of a micro-batch of {len(packed.tokens)} tokens "
                f"(tokens_per_microbatch: {self.budget})"
            ):
                output = self._call(model, packed, ids, outputs)
            note_progress()
            return output, lambda output, non_loss_data=False: step(packed, output)

        largest = max(len(packed.tokens) for packed in parts)
        with self.during(
            f"computing {len(parts)} micro-batch(es) of at most {largest} tokens "
            f"(tokens_per_microbatch is {self.budget})"
        ):
            results: list[Any] = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=[iter(parts) for _ in models],
                model=list(models),
                num_microbatches=len(parts),
                seq_length=largest,
                micro_batch_size=1,
                forward_only=forward_only,
                collect_non_loss_data=forward_only,
            )
        return results

    def _call(self, model: torch.nn.Module, packed: Packed, ids: np.ndarray, outputs: Outputs) -> torch.Tensor:
        """Return the stage's output: hidden states, or on the last stage `scores` (or values) at the positions that
        this rank needs."""
        own, predictor, numbers = self._select_own(packed)
        tokens = np.where(own < 0, 0, ids[own]) if len(ids) else np.zeros_like(own)
        targets = torch.zeros(len(predictor), dtype=torch.int64)
        targets[: len(numbers)] = torch.from_numpy(ids[packed.needed[numbers]])
        score = None if outputs.values else functools.partial(self._score, self._put(targets), outputs)
        inner: GPTModel = unwrap_model(model)
        with only_at(inner, self._put(torch.from_numpy(predictor)), score):
            output: torch.Tensor = model(
                input_ids=self._put(torch.from_numpy(tokens)[None]),
                position_ids=None,
                attention_mask=None,
                packed_seq_params=pack_parameters(packed.lengths, self.device),
            )
        return output

    def _put(self, indices: torch.Tensor) -> torch.Tensor:
        return indices.to(self.device, non_blocking=True)

    def _select_own(self, packed: Packed) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the input tokens of this context-parallel rank, and the needed tokens that this rank predicts.

        Needed tokens are given by their predicting positions among the rank's tokens, and by their indices in
        `packed.needed`. There is at least one position, so that an output layer always has something to do.
        """
        size, rank = self._context.size(), self._context.rank()
        tokens, predictor, numbers = packed.tokens, packed.predictor, np.arange(len(packed.predictor))
        if size > 1:
            begins = np.cumsum((0, *packed.lengths[:-1]))
            rows = zip(begins, packed.lengths, strict=True)
            places = np.concatenate([begin + find_positions(length, size, rank).numpy() for begin, length in rows])
            where = np.full(len(tokens), -1)
            where[places] = np.arange(len(places))
            tokens, predictor = tokens[places], where[predictor]
            numbers = np.flatnonzero(predictor >= 0)
            predictor = predictor[numbers]
        return tokens, predictor if len(predictor) else np.zeros(1, dtype=np.int64), numbers

    def _build_columns(self, packed: Packed, output: torch.Tensor, outputs: Outputs) -> dict[str, torch.Tensor]:
        """Return the requested columns, float32 `(needed tokens,)`, the same on all ranks of a micro-batch."""
        _, _, numbers = self._select_own(packed)
        columns = {"values": output[0, :, 0].float()} if outputs.values else score_columns(output[0], outputs)
        return {name: self._join(column, numbers, len(packed.needed)) for name, column in columns.items()}

    def _score(
        self, targets: torch.Tensor, outputs: Outputs, hidden: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        """Return `scores` of the tokens that this context-parallel rank predicts, from its part of the vocabulary."""
        split = None
        if self._tensor.size() > 1:
            first = self._tensor.rank() * len(weight)
            split = Split(first, max(0, min(len(weight), self.vocabulary - first)), self._tensor)
        return scores(hidden, weight, None, targets, outputs, split)

    def _join(self, column: torch.Tensor, numbers: np.ndarray, needed: int) -> torch.Tensor:
        """Join the results of all ranks that split the sequences."""
        column = column[: len(numbers)]
        if self._context.size() == 1:
            return column
        spread = column.new_zeros(needed).index_copy(0, self._put(torch.from_numpy(numbers)), column)
        summed: torch.Tensor = _Sum.apply(spread, self._context)
        return summed


class _Sum(torch.autograd.Function):
    """A sum over ranks. In the backward pass, each rank uses its own gradient of the sum as the gradient of its term.

    The gradients are not summed over the ranks, because all ranks compute the same loss from the sum.
    """

    @staticmethod
    def forward(ctx: Any, column: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        summed = column.clone()
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gradients[0], None
