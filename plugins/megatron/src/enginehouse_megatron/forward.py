"""Running a part of a model over micro-batches with megatron-core's schedules, and turning tokens into outputs.

All stages of a pipeline and all ranks that split a matrix or a sequence cut the same batch the same way, each by
itself; how many micro-batches there are is agreed over the data-parallel ranks as well.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from enginehouse_megatron import kernels  # noqa: F401  before all else of megatron-core

# isort: split
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import unwrap_model

from enginehouse.data import Batch, Ragged
from enginehouse.engines.progress import note_progress
from enginehouse.engines.train import LossSpec, LossValue, Mean, Metrics, Outputs, merge_metrics
from enginehouse.plugin import plugins
from enginehouse_megatron.layers import positions
from enginehouse_megatron.output_layer import only_at
from enginehouse_megatron.packing import Packed, nothing, plan
from enginehouse_torch.modeling.heads import check_outputs
from enginehouse_torch.modeling.packing import Rows
from enginehouse_torch.modeling.ranks import Ranks
from enginehouse_torch.modeling.scores import Split, score_columns, scores
from enginehouse_torch.modeling.token_view import COLUMNS, token_ids, token_view

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


class StagePasses:
    """Forward and backward passes of one rank over its part of the model.

    Args:
        settings: megatron-core's config of the model.
        vocabulary: how many tokens there are.
        has_values: whether the model has a value head.
        device: where it computes.
        tokens_per_microbatch: most tokens of a micro-batch, a longer row excepted.
        ranks: all ranks.
        during: entered around each pass, given what is being done (`MemoryGuard.during`).
    """

    def __init__(
        self,
        settings: TransformerConfig,
        *,
        vocabulary: int,
        has_values: bool,
        device: torch.device,
        tokens_per_microbatch: int,
        ranks: Ranks,
        during: Callable[[str], AbstractContextManager[object]],
    ):
        self._settings = settings
        self._vocabulary = vocabulary
        self._has_values = has_values
        self._device = device
        self._budget = tokens_per_microbatch
        self._ranks = ranks
        self._during = during
        self._losses: dict[str, Callable[..., LossValue]] = {}
        self._tensor = parallel_state.get_tensor_model_parallel_group()
        self._context = parallel_state.get_context_parallel_group()
        self._is_last = parallel_state.is_pipeline_last_stage()
        context, tensor = self._context.size(), self._tensor.size()
        self._each = 2 * context if context > 1 else 1
        self._whole = self._each * (tensor if settings.sequence_parallel else 1)

    def forward(self, models: Sequence[torch.nn.Module], batch: Batch, outputs: Outputs) -> Batch | None:
        """Compute `outputs` without gradients; None where this rank is not on the last stage."""
        check_outputs(self._has_values, outputs)
        ids = token_ids(batch)
        parts = self._parts(batch)

        def step(packed: Packed, found: torch.Tensor) -> Any:
            return packed, self._outputs(packed, found, outputs)

        with torch.no_grad():
            results = self._run(models, parts, ids, outputs, step, forward_only=True)
        if not self._is_last:
            return None
        columns = {name: torch.zeros(len(ids)) for name in COLUMNS if getattr(outputs, name)}
        for packed, values in results:  # after all were launched: reading a result waits for the device
            for name, column in values.items():
                columns[name][torch.from_numpy(packed.needed)] = column.cpu()
        offsets = batch.ragged("input_ids").offsets
        return Batch({name: Ragged(values, offsets) for name, values in columns.items()})

    def forward_backward(
        self, models: Sequence[torch.nn.Module], batch: Batch, loss: LossSpec
    ) -> tuple[Metrics, float]:
        """Accumulate the gradient of the summed `loss`, computed from the tokens of `loss_mask` alone.

        Returns:
            Metrics, and the weight that the sum's mean divides by; nothing and 0 off the last stage.
        """
        check_outputs(self._has_values, loss.outputs)
        function = self._loss(loss.name)
        ids = token_ids(batch)
        metrics: list[Metrics] = []
        weights: list[float] = []

        def step(packed: Packed, found: torch.Tensor) -> Any:
            values = self._outputs(packed, found, loss.outputs)
            # Even where the loss depends on nothing of it: the other stages wait for a gradient.
            total = 0.0 * sum(column.sum() for column in values.values())
            if packed.rows is not None:
                with self._during(f"computing the loss {(loss.wraps or loss.name)!r} of {len(packed.rows)} rows"):
                    view = token_view(batch, packed.rows, packed.needed, values, loss.outputs, self._device)
                    value = function(view, **loss.arguments)
                weights.append(value.weight)
                metrics.append({**value.metrics, "loss": Mean(value.total.item(), value.weight)})
                total = total + value.total.to(self._device)
            # The second is megatron-core's count of tokens: gradients are divided at the step, by the loss's weight.
            return total, torch.zeros((), dtype=torch.int), {}

        self._run(models, self._parts(batch), ids, loss.outputs, step, forward_only=False)
        return merge_metrics(metrics), sum(weights)

    def _parts(self, batch: Batch) -> list[Packed]:
        """The batch's micro-batches, as many as on every other rank, one at least."""
        mask = batch.ragged("loss_mask").values.cpu().numpy() if "loss_mask" in batch else None
        rows = Rows.of(batch.ragged("input_ids").offsets.numpy(), mask)
        parts = plan(rows, self._budget, each=self._each, whole=self._whole)
        most = self._ranks.largest(max(len(parts), 1))
        if self._settings.virtual_pipeline_model_parallel_size is not None:  # its schedule goes by groups of as many
            most += -most % self._settings.pipeline_model_parallel_size
        return [*parts, *[nothing(self._whole)] * (most - len(parts))]

    def _run(
        self,
        models: Sequence[torch.nn.Module],
        parts: Sequence[Packed],
        ids: np.ndarray,
        outputs: Outputs,
        step: Callable[[Packed, torch.Tensor], Any],
        *,
        forward_only: bool,
    ) -> list[Any]:
        """Run all micro-batches through the pipeline.

        Args:
            models: this rank's parts, as they are to be called.
            parts: the micro-batches.
            ids: the batch's flat token ids.
            outputs: what is asked of the model.
            step: on the last stage: given a micro-batch and the model's output, what is collected, or with gradients
                the loss, a count of tokens and what is collected.
            forward_only: without gradients.

        Returns:
            What was collected, a micro-batch an entry; nothing off the last stage.
        """

        def forward_step(coming: Iterator[Packed], called: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
            packed = next(coming)
            inner: GPTModel = unwrap_model(called)
            with self._during(self._said("a forward pass", packed)):
                found = self._call(called, inner, packed, ids, outputs)
            note_progress()
            return found, lambda output, non_loss_data=False: step(packed, output)

        largest = max(len(packed.tokens) for packed in parts)
        with self._during(
            f"computing {len(parts)} micro-batch(es) of at most {largest} tokens "
            f"(tokens_per_microbatch is {self._budget})"
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

    def _call(
        self, called: torch.nn.Module, inner: GPTModel, packed: Packed, ids: np.ndarray, outputs: Outputs
    ) -> torch.Tensor:
        """The stage's output: hidden states, or scores (or values) at the positions this rank needs."""
        lengths = torch.tensor((0, *packed.lengths), dtype=torch.int32)
        begins = lengths.cumsum(0, dtype=torch.int32).to(self._device)
        own, predictor, which = self._own(packed)
        tokens = np.where(own < 0, 0, ids[own]) if len(ids) else np.zeros_like(own)
        longest = max(packed.lengths)
        parameters = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=begins,
            cu_seqlens_kv=begins,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
        targets = torch.zeros(len(predictor), dtype=torch.int64)
        targets[: len(which)] = torch.from_numpy(ids[packed.needed[which]])
        score = None if outputs.values else functools.partial(self._score, targets.to(self._device), outputs)
        with only_at(inner, torch.from_numpy(predictor).to(self._device), score):
            found: torch.Tensor = called(
                input_ids=torch.from_numpy(tokens)[None].to(self._device),
                position_ids=None,
                attention_mask=None,
                packed_seq_params=parameters,
            )
        return found

    def _own(self, packed: Packed) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What this context-parallel rank has: its tokens, and of the needed ones where they are predicted and which.

        There is one predictor at least, so that an output layer always has something to do.
        """
        size, rank = self._context.size(), self._context.rank()
        tokens, predictor, which = packed.tokens, packed.predictor, np.arange(len(packed.predictor))
        if size > 1:
            begins = np.cumsum((0, *packed.lengths[:-1]))
            places = np.concatenate(
                [
                    begin + positions(length, size, rank).numpy()
                    for begin, length in zip(begins, packed.lengths, strict=True)
                ]
            )
            where = np.full(len(tokens), -1)
            where[places] = np.arange(len(places))
            tokens, predictor = tokens[places], where[predictor]
            which = np.flatnonzero(predictor >= 0)
            predictor = predictor[which]
        return tokens, predictor if len(predictor) else np.zeros(1, dtype=np.int64), which

    def _outputs(self, packed: Packed, found: torch.Tensor, outputs: Outputs) -> dict[str, torch.Tensor]:
        """The columns asked for, each float32 `(needed tokens,)`, the same on all ranks of a micro-batch."""
        _, _, which = self._own(packed)
        needed = len(packed.needed)
        if outputs.values:
            return {"values": self._of_all(found[0, :, 0].float(), which, needed)}
        columns = score_columns(found[0], outputs)
        return {name: self._of_all(column, which, needed) for name, column in columns.items()}

    def _score(
        self, targets: torch.Tensor, outputs: Outputs, hidden: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        """`scores` of the tokens that this context-parallel rank predicts, by this rank's rows of the vocabulary."""
        split = None
        if self._tensor.size() > 1:
            first = self._tensor.rank() * len(weight)
            split = Split(first, max(0, min(len(weight), self._vocabulary - first)), self._tensor)
        return scores(hidden, weight, None, targets, outputs, split)

    def _of_all(self, column: torch.Tensor, which: np.ndarray, needed: int) -> torch.Tensor:
        """The results of all ranks that share the sequences, from this rank's."""
        column = column[: len(which)]
        if self._context.size() == 1:
            return column
        spread = column.new_zeros(needed).index_copy(0, torch.from_numpy(which).to(column.device), column)
        summed: torch.Tensor = _Sum.apply(spread, self._context)
        return summed

    def _said(self, what: str, packed: Packed) -> str:
        return (
            f"computing {what} of a micro-batch of {len(packed.tokens)} tokens (tokens_per_microbatch: {self._budget})"
        )

    def _loss(self, name: str) -> Callable[..., LossValue]:
        if name not in self._losses:
            self._losses[name] = plugins().function("loss", name)
        return self._losses[name]


class _Sum(torch.autograd.Function):
    """A sum over ranks that all compute the same with it: each one's gradient goes back to its own part alone."""

    @staticmethod
    def forward(ctx: Any, column: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        summed = column.clone()
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gradients[0], None
