"""The built-in training engine: any Hugging Face causal LM in plain PyTorch, replicated over data-parallel ranks.

The laptop default, and the oracle other engines are compared with: it holds the whole model on every rank and does
nothing to it that changes a result. There is never any dropout, in training neither: a policy's logprobs must be the
same whoever computes them.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from enginehouse.backends.torch import checkpoint
from enginehouse.backends.torch.heads import ModelInput, check_outputs, token_outputs
from enginehouse.backends.torch.loading import load_model, quiet_transformers
from enginehouse.backends.torch.optim import FlatAdamW
from enginehouse.backends.torch.packing import Layout, Rows, lay_out, plan_trees
from enginehouse.backends.torch.ranks import Ranks, device_of
from enginehouse.backends.torch.schedule import learning_rate
from enginehouse.backends.torch.sharing import attention_cost, can_share_prompts
from enginehouse.backends.torch.weights import ReplicatedWeights, stored_names, unique_state
from enginehouse.data import Batch, Ragged, plan_microbatches
from enginehouse.engines.mesh import Mesh
from enginehouse.engines.model import TOKENIZER_COMPANIONS, TOKENIZER_FILES
from enginehouse.engines.train import ALL, LossSpec, LossValue, Mean, Metrics, Outputs, TokenView, merge_metrics
from enginehouse.errors import EnginehouseError
from enginehouse.plugin import plugins

if TYPE_CHECKING:
    from enginehouse.backends.torch.options import TorchTrainOptions
    from enginehouse.engines.model import ModelSpec, ProcessContext


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Some rows of a batch and their model input.

    Attributes:
        rows: the batch's rows, in the order the loss sees them; None: all, in order.
        layout: None where nothing is needed of any of them.
    """

    rows: npt.NDArray[np.int64] | None
    layout: Layout | None


class TorchTrainEngine:
    """`TrainEngine` on plain PyTorch (`enginehouse.engines.train`), one object a rank."""

    mesh: Mesh

    def setup(self, model: ModelSpec, options: TorchTrainOptions, context: ProcessContext) -> None:
        """Join the ranks, load the model and give every rank rank 0's weights.

        Optimizer state is made when it is first needed: an engine that only computes logprobs never has any.

        Raises:
            ModelError: the model cannot be loaded.
            ConfigError: the schedule decays and `total_steps` is not set.
        """
        learning_rate(options.warmup_steps, options)
        self._spec, self._options, self._context = model, options, context
        self._ranks = Ranks.join(context)
        self.mesh = Mesh.of({"dp": context.world_size}, context.rank)
        self._model = load_model(model, device_of(context))
        self._stored = stored_names(Path(model.path))
        if model.head == "value":
            # The language model's own head gets no gradient: weight decay must not shrink it.
            _untied_head(self._model).requires_grad_(False)
        self._ranks.broadcast(unique_state(self._model).values())
        self._shares_prompts = options.share_prompts == "auto" and can_share_prompts(self._model)
        self._attention_cost = attention_cost(self._model)
        self._optimizer: FlatAdamW | None = None
        self._losses: dict[str, Callable[..., LossValue]] = {}

    # Computing

    def forward(self, batch: Batch, outputs: Outputs) -> Batch:
        """Compute `outputs` without gradients.

        Where the batch has a `loss_mask`, only for the tokens it marks; all others are 0.
        """
        check_outputs(self._model, outputs)
        ids = batch.ragged("input_ids")
        flat_ids = _flat_ids(batch)
        columns = {
            name: torch.zeros(len(flat_ids)) for name in ("logprobs", "entropy", "values") if getattr(outputs, name)
        }
        parts = []
        with torch.no_grad():
            for part in self._microbatches(batch):
                if part.layout is not None:
                    model_input = ModelInput.of(part.layout, flat_ids, self._model.device)
                    parts.append((part.layout, token_outputs(self._model, model_input, outputs)))
        for layout, found in parts:  # after all were launched: reading a result waits for the device
            for name, values in found.items():
                columns[name][torch.from_numpy(layout.needed)] = values.cpu()
        return Batch({name: Ragged(values, ids.offsets) for name, values in columns.items()})

    def forward_backward(self, batch: Batch, loss: LossSpec) -> Metrics:
        """Accumulate the gradient of `loss`, which is computed from the tokens of `loss_mask` alone."""
        check_outputs(self._model, loss.outputs)
        optimizer = self._built_optimizer()
        function = self._loss(loss.name)
        flat_ids = _flat_ids(batch)
        metrics: list[Metrics] = []
        for part in self._microbatches(batch):
            outputs: Mapping[str, torch.Tensor] = {}
            if part.layout is not None:
                model_input = ModelInput.of(part.layout, flat_ids, self._model.device)
                outputs = token_outputs(self._model, model_input, loss.outputs)
            value = function(self._view(batch, part, outputs, loss.outputs), **loss.arguments)
            if value.total.requires_grad:
                value.total.backward()
            optimizer.count(value.weight)
            metrics.append({**value.metrics, "loss": Mean(value.total.item(), value.weight)})
        return merge_metrics(metrics)

    def optim_step(self) -> Metrics:
        """Reduce gradients over the ranks and take one AdamW step; see `FlatAdamW.step`."""
        return self._built_optimizer().step()

    def _microbatches(self, batch: Batch) -> list[Microbatch]:
        """Cut a batch so that no forward pass has more padded tokens than the budget, a longer row excepted."""
        ids = batch.ragged("input_ids")
        mask = batch.ragged("loss_mask").values.cpu().numpy() if "loss_mask" in batch else None
        rows = Rows.of(ids.offsets.numpy(), mask)
        budget = self._options.tokens_per_microbatch
        trees = plan_trees(rows, _flat_ids(batch), budget, self._attention_cost, self._shares_prompts)
        plan = plan_microbatches([tree.tokens for tree in trees], budget)
        idle = np.flatnonzero(rows.ends == 0)
        if not plan:
            return [Microbatch(None, None)] if len(idle) else []
        if len(plan) == 1:
            return [Microbatch(None, lay_out(rows, trees))]
        parts = []
        for number, members in enumerate(plan):
            chosen = [trees[member] for member in members]
            taken = [row for tree in chosen for row in tree.rows]
            if number == 0:
                taken.extend(idle.tolist())  # nothing to compute, but the loss may count them
            parts.append(Microbatch(np.sort(np.array(taken, dtype=np.int64)), lay_out(rows, chosen)))
        return parts

    def _view(self, batch: Batch, part: Microbatch, found: Mapping[str, torch.Tensor], outputs: Outputs) -> TokenView:
        """The loss's view of a micro-batch: its rows' columns, and `found` spread over all their tokens."""
        device = self._model.device
        offsets = batch.ragged("input_ids").offsets
        needed = None if part.layout is None else part.layout.needed
        if part.rows is not None:
            batch = batch.take(part.rows)
            whole, offsets = offsets.numpy(), batch.ragged("input_ids").offsets
            if needed is not None:
                row = np.searchsorted(whole, needed, side="right") - 1
                needed = needed - whole[row] + offsets.numpy()[np.searchsorted(part.rows, row)]
        tokens = int(offsets[-1])
        spread: dict[str, torch.Tensor] = {}
        for name in ("logprobs", "entropy", "values"):
            if getattr(outputs, name):
                spread[name] = torch.zeros(tokens, device=device)
                if needed is not None:
                    spread[name] = spread[name].index_copy(0, torch.from_numpy(needed).to(device), found[name])
        columns: dict[str, torch.Tensor] = {}
        for name in batch.columns:
            column = batch[name]
            if isinstance(column, Ragged):
                if column.offsets is offsets or torch.equal(column.offsets, offsets):
                    columns[name] = column.values.to(device)
            elif isinstance(column, torch.Tensor):
                columns[name] = column.to(device)
        row_of = torch.repeat_interleave(torch.arange(len(batch)), offsets.diff(), output_size=tokens).to(device)
        return TokenView(spread, columns, row_of, len(batch))

    def _loss(self, name: str) -> Callable[..., LossValue]:
        if name not in self._losses:
            self._losses[name] = plugins().function("loss", name)
        return self._losses[name]

    def _built_optimizer(self) -> FlatAdamW:
        """The optimizer, made at first use: buffers as large as the model itself."""
        if self._optimizer is None:
            trained = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
            self._optimizer = FlatAdamW(trained, self._options, self._ranks.world_size)
        return self._optimizer

    # Weights and files

    def weight_source(self) -> ReplicatedWeights:
        """The live weights under their Hugging Face names, tied ones once; every rank holds all of them."""
        return ReplicatedWeights(self._model, self._stored)

    def onload(self, tags: tuple[str, ...] = ALL) -> None:
        """Not offered."""
        raise EnginehouseError(f"{self._context}: the torch backend does not declare the capability 'offload'")

    def offload(self, tags: tuple[str, ...] = ALL) -> None:
        """Not offered."""
        self.onload(tags)

    def save(self, path: str, what: tuple[str, ...] = ALL) -> None:
        """Write `"model"`, `"optimizer"` (with the schedule) and `"rng"`, whole or not at all; collective."""
        parts = checkpoint.parts_of(what)
        states = self._ranks.gather(_random_states() if "rng" in parts else {})

        def write() -> None:
            with checkpoint.whole_directory(path) as directory:
                if "model" in parts:
                    checkpoint.write_part(directory, "model", unique_state(self._model))
                if "optimizer" in parts:
                    optimizer = self._built_optimizer()
                    checkpoint.write_part(
                        directory, "optimizer", dict(optimizer.state()), {"step": optimizer.step_number}
                    )
                if "rng" in parts:
                    checkpoint.write_part(
                        directory,
                        "rng",
                        {f"{kind}/{rank}": s for rank, own in enumerate(states) for kind, s in own.items()},
                    )

        self._ranks.on_rank_zero(write)

    def load(self, path: str, what: tuple[str, ...] = ALL) -> None:
        """Load what `save` wrote, with any number of ranks; each rank reads the files itself.

        A rank the checkpoint has no random state of keeps its own.

        Raises:
            CheckpointError: it is missing, incomplete or of another model.
        """
        parts = checkpoint.parts_of(what)
        if "model" in parts:
            checkpoint.read_into(path, "model", unique_state(self._model))
            if self._optimizer is not None:
                self._optimizer.parameters_changed()
        if "optimizer" in parts:
            optimizer = self._built_optimizer()
            optimizer.restored(checkpoint.read_into(path, "optimizer", dict(optimizer.state()))["step"])
        if "rng" in parts:
            _restore_random_states(checkpoint.read_part(path, "rng"), self._ranks.rank)

    def export_hf(self, path: str) -> None:
        """Write a Hugging Face directory, with the tokenizer of the directory the model came from; collective."""

        def write() -> None:
            directory = Path(path)
            with quiet_transformers():
                self._model.save_pretrained(directory)
                for pattern in (*TOKENIZER_FILES, *TOKENIZER_COMPANIONS):
                    for file in filter(Path.is_file, Path(self._spec.path).glob(pattern)):
                        shutil.copyfile(file, directory / file.name)

        self._ranks.on_rank_zero(write)

    def shutdown(self) -> None:
        """Release the model and leave the process group."""
        self._optimizer = None
        del self._model
        self._ranks.leave()


def _flat_ids(batch: Batch) -> npt.NDArray[np.int64]:
    """The batch's token ids end to end, on the host."""
    return batch.ragged("input_ids").values.cpu().numpy().astype(np.int64, copy=False)


def _untied_head(model: Any) -> torch.nn.Module:
    """The model's own output layer if it shares no parameter with the rest, else an empty module."""
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    return torch.nn.Identity() if head.weight is embedding.weight else head


def _random_states() -> dict[str, torch.Tensor]:
    """This process's random states by kind of device."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _restore_random_states(states: Mapping[str, torch.Tensor], rank: int) -> None:
    if (state := states.get(f"cpu/{rank}")) is not None:
        torch.set_rng_state(state)
    if torch.cuda.is_available() and (state := states.get(f"cuda/{rank}")) is not None:
        torch.cuda.set_rng_state(state)
