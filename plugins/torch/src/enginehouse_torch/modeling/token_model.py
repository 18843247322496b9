"""A causal LM that takes batches and returns per-token outputs and gradients, in micro-batches under a token budget.

All training engines in torch use it. Results never depend on how a batch was split.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from enginehouse.data import Batch, Ragged, plan_microbatches
from enginehouse.engines.progress import note_progress
from enginehouse.engines.train import LossSpec, LossValue, Mean, Metrics, Outputs, merge_metrics
from enginehouse.plugin import plugins
from enginehouse_torch.modeling.attention import PADDED, model_input, packed_token_outputs
from enginehouse_torch.modeling.heads import ModelInput, check_outputs, token_outputs
from enginehouse_torch.modeling.holding import VALUE_HEAD
from enginehouse_torch.modeling.packing import BatchRows, TreeLayout, lay_out, plan_trees
from enginehouse_torch.modeling.sharing import attention_cost, mask_cost, try_attention
from enginehouse_torch.modeling.token_view import COLUMNS, token_ids, token_view

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from enginehouse_torch.options import AttentionChoice


__all__ = ["TokenModel"]


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Some rows of a batch and their model input.

    Attributes:
        rows: the batch's rows, in the order the loss sees them; None: all, in order.
        layout: None if no output of the rows is needed.
    """

    rows: npt.NDArray[np.int64] | None
    layout: TreeLayout | None


class TokenModel:
    """Forward and backward passes of a training engine over one model.

    Args:
        model: the model, with or without a value head (`enginehouse_torch.modeling.loading`).
        device: the device that it computes on.
        tokens_per_microbatch: maximum padded tokens of one forward pass, unless a single row is longer.
        share_prompts: True if rows with the same prompt may compute it once, provided that the model supports it.
        dtype: the dtype that the model computes in; None: the dtype of its parameters.
        attention: the option `attention` (`sharing.try_attention`); any but `"sdpa"` changes the model's attention.
        passes: for ranks that must run the model together (sharded parameters): maps the number of forward passes that
            this rank needs to the number that all ranks run. A rank runs its additional passes on one token, which the
            loss does not count.
        during: entered around each pass and each loss, with a description of it (`MemoryGuard.during`).

    Attributes:
        token_outputs: runs the model. An engine that splits sequences over ranks replaces it; the model was tried out
            with `heads.token_outputs`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        device: torch.device,
        tokens_per_microbatch: int,
        share_prompts: bool,
        dtype: torch.dtype | None = None,
        attention: AttentionChoice = "sdpa",
        passes: Callable[[int], int] | None = None,
        during: Callable[[str], AbstractContextManager[object]] = contextlib.nullcontext,
    ):
        self.model = model
        self.device = device
        self.token_outputs: Callable[[PreTrainedModel, ModelInput, Outputs], dict[str, torch.Tensor]] = token_outputs
        self._budget = tokens_per_microbatch
        self._attention, self._shares_prompts = try_attention(
            model, attention, share_prompts, device, dtype or model.dtype
        )
        if self._attention != PADDED:
            self.token_outputs = packed_token_outputs
        self._attention_cost, self._mask_cost = attention_cost(model), mask_cost(model, self._attention, device)
        if device.type == "cpu":
            # On a CPU torch needs no copy of a key for each query head that shares it, not even with a mask.
            os.environ.setdefault("TRANSFORMERS_SDPA_FORCE_GQA", "1")
        self._passes = passes
        self._during = during
        self._has_values = hasattr(model, VALUE_HEAD)
        self._losses: dict[str, Callable[..., LossValue]] = {}

    def forward(self, batch: Batch, outputs: Outputs) -> Batch:
        """Compute `outputs` without gradients, as `TrainEngine.forward` says."""
        check_outputs(self._has_values, outputs)
        ids = batch.ragged("input_ids")
        flat_ids = token_ids(batch)
        columns = {name: torch.zeros(len(flat_ids)) for name in COLUMNS if getattr(outputs, name)}
        results: list[tuple[TreeLayout, dict[str, torch.Tensor]]] = []
        with torch.no_grad():
            parts = self.microbatches(batch)
            idle = self._idle_passes(parts)
            for layout in (part.layout for part in parts):
                if layout is not None:
                    with self._during(self._describe("forward pass", layout)):
                        results.append((layout, self.token_outputs(self.model, self._input(layout, flat_ids), outputs)))
                    note_progress()
            for _ in range(idle):
                self.token_outputs(self.model, self._idle_input(), outputs)
        for layout, values in results:  # after all were launched, because reading a result waits for the device
            for name, column in values.items():
                columns[name][torch.from_numpy(layout.needed)] = column.cpu()
        return Batch({name: Ragged(values, ids.offsets) for name, values in columns.items()})

    def forward_backward(self, batch: Batch, loss: LossSpec) -> tuple[Metrics, float]:
        """Accumulate the gradient of the summed `loss`, computed only from the tokens of `loss_mask`.

        Returns:
            Metrics, and the weight of the loss. The summed loss divided by its weight is the mean loss.
        """
        check_outputs(self._has_values, loss.outputs)
        function = self._get_loss(loss.name)
        flat_ids = token_ids(batch)
        metrics: list[Metrics] = []
        totals: list[torch.Tensor] = []
        weights: list[float] = []
        parts = self.microbatches(batch)
        idle = self._idle_passes(parts)
        for part in parts:
            outputs: Mapping[str, torch.Tensor] = {}
            if part.layout is not None:
                with self._during(self._describe("forward pass", part.layout)):
                    outputs = self.token_outputs(self.model, self._input(part.layout, flat_ids), loss.outputs)
            with self._during(self._describe(f"loss {(loss.wraps or loss.name)!r}", part.layout)):
                needed = None if part.layout is None else part.layout.needed
                view = token_view(batch, part.rows, needed, outputs, loss.outputs, self.device)
                value = function(view, **loss.arguments)
            with self._during(self._describe("backward pass", part.layout)):
                if part.layout is not None and self._passes is not None:
                    _backward(value.total, outputs)
                elif value.total.requires_grad:
                    value.total.backward()
            totals.append(value.total.detach())
            weights.append(value.weight)
            metrics.append(value.metrics)
            note_progress()
        for _ in range(idle):
            _backward(torch.zeros(()), self.token_outputs(self.model, self._idle_input(), loss.outputs))
        # Read after all were launched, because reading a total waits for the device.
        read = torch.stack(totals).tolist() if totals else []
        metrics += [{"loss": Mean(total, weight)} for total, weight in zip(read, weights, strict=True)]
        return merge_metrics(metrics), sum(weights)

    def microbatches(self, batch: Batch) -> list[Microbatch]:
        """Cut a batch so that no forward pass has more padded tokens than the budget, unless a single row is longer."""
        ids = batch.ragged("input_ids")
        mask = batch.ragged("loss_mask").values.cpu().numpy() if "loss_mask" in batch else None
        rows = BatchRows.from_offsets(ids.offsets.numpy(), mask)
        trees = plan_trees(
            rows, token_ids(batch), self._budget, self._attention_cost, self._shares_prompts, self._mask_cost
        )
        packed = self._attention.packs(any(tree.prompt for tree in trees))
        plan = plan_microbatches([tree.tokens for tree in trees], self._budget, padded=not packed)
        idle = np.flatnonzero(rows.ends == 0)
        if not plan:
            return [Microbatch(None, None)] if len(idle) else []
        if len(plan) == 1:
            return [Microbatch(None, lay_out(rows, trees, packed))]
        parts = []
        for number, members in enumerate(plan):
            chosen = [trees[member] for member in members]
            chosen_rows = [row for tree in chosen for row in tree.rows]
            if number == 0:
                chosen_rows.extend(idle.tolist())  # nothing to compute, but the loss may count them
            parts.append(Microbatch(np.sort(np.array(chosen_rows, dtype=np.int64)), lay_out(rows, chosen, packed)))
        return parts

    def _idle_passes(self, parts: list[Microbatch]) -> int:
        """Return the number of passes that this rank makes only because other ranks make more; collective.

        Must be called before the first pass.
        """
        passes = sum(part.layout is not None for part in parts)
        return 0 if self._passes is None else self._passes(passes) - passes

    def _describe(self, what: str, layout: TreeLayout | None) -> str:
        """Describe the work on a micro-batch, for messages."""
        sequences, length = (0, 0) if layout is None else layout.tokens.shape
        return (
            f"computing the {what} of a micro-batch of {sequences * length} tokens ({sequences} x {length}; "
            f"tokens_per_microbatch is {self._budget})"
        )

    def _input(self, layout: TreeLayout, flat_ids: npt.NDArray[np.int64]) -> ModelInput:
        return model_input(layout, flat_ids, self.device, self._attention)

    def _idle_input(self) -> ModelInput:
        """Return an input of one token that needs no output."""
        none = torch.zeros(0, dtype=torch.int64, device=self.device)
        return ModelInput(torch.zeros((1, 1), dtype=torch.int64, device=self.device), None, None, none, none)

    def _get_loss(self, name: str) -> Callable[..., LossValue]:
        if name not in self._losses:
            self._losses[name] = plugins().function("loss", name)
        return self._losses[name]


def _backward(total: torch.Tensor, outputs: Mapping[str, torch.Tensor]) -> None:
    """Run the backward pass through the model even if the loss does not depend on the model's outputs, because the
    other ranks run this pass too, and passes may communicate."""
    through = sum((column.sum() for column in outputs.values()), start=torch.zeros((), device=total.device))
    (total + 0.0 * through.to(total.device)).backward()
