"""The `torch` training engine: any Hugging Face causal LM in plain PyTorch, replicated over data-parallel ranks.

It is the default for a laptop and the reference that other engines are compared with: it holds the whole model on every
rank and does nothing to the model that changes a result. It uses no dropout, not even in training, because every
engine must compute the same logprobs of a policy.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch

from enginehouse.data import Batch
from enginehouse.engines.memory import ModelShape
from enginehouse.engines.mesh import Mesh
from enginehouse.engines.model import NO_FLOAT16, ModelSpec, ProcessContext
from enginehouse.engines.storages import give_back_freed_memory
from enginehouse.engines.train import ALL, LossSpec, Metrics, Outputs
from enginehouse.errors import ModelError
from enginehouse.quiet import quiet_transformers
from enginehouse.weights.names import stored_names, unique_state
from enginehouse_torch.modeling import checkpoint
from enginehouse_torch.modeling.export import write_companions, write_weights
from enginehouse_torch.modeling.files import parts_of
from enginehouse_torch.modeling.holding import has_other_dtype
from enginehouse_torch.modeling.loading import load_model, load_with_holding
from enginehouse_torch.modeling.memory import MemoryGuard, keep_freed_memory
from enginehouse_torch.modeling.offloading import TAGS, Offloading, Tag
from enginehouse_torch.modeling.ranks import Ranks, device_of
from enginehouse_torch.modeling.schedule import learning_rate, lr_factors
from enginehouse_torch.modeling.sizes import LITTLE_BYTES, cpu_tokens
from enginehouse_torch.modeling.token_model import TokenModel
from enginehouse_torch.optim import FlatAdamW, gather_values, lay_out
from enginehouse_torch.options import TorchTrainOptions
from enginehouse_torch.replicated_weights import ReplicatedWeights

NEEDS_LESS = (
    "a smaller tokens_per_microbatch",
    "a training backend that shards the model over its processes, because each torch process holds the whole model",
)
"""Advice for a rank that runs out of memory."""


class TorchTrainEngine:
    """`TrainEngine` on plain PyTorch (`enginehouse.engines.train`), one object per rank."""

    mesh: Mesh

    def setup(self, model: ModelSpec, options: TorchTrainOptions, context: ProcessContext) -> None:
        """Join the ranks, load the model and copy the weights of rank 0 to every rank.

        Optimizer state is allocated at first use, so an engine that only computes logprobs has none.

        Raises:
            ModelError: the model cannot be loaded, or is to be trained in float16.
            ConfigError: the schedule decays and `total_steps` is not set, or a pattern of `lr_groups` matches nothing.
        """
        learning_rate(options.warmup_steps, options)
        if model.dtype == "float16":
            raise ModelError(f"torch: {NO_FLOAT16}")
        self._spec, self._options, self._context = model, options, context
        self._ranks = Ranks.join(context)
        self.mesh = Mesh.of({"dp": context.world_size}, context.rank)
        self._memory = MemoryGuard(context, NEEDS_LESS)
        keep_freed_memory()
        with self._memory.during("loading the model"):
            self._model, self._holding = load_with_holding(model, device_of(context))
        lr_factors(self._trained_parameters(), options)
        self._stored = stored_names(Path(model.path))
        self._ranks.broadcast(unique_state(self._model).values())
        trained, flat = self._trained_parameters(), model.dtype == "float32"
        self._values = gather_values(trained, options) if flat and trained else None
        self._token_model = TokenModel(
            self._model,
            device=self._model.device,
            tokens_per_microbatch=self._count_pass_tokens(),
            share_prompts=options.share_prompts == "auto",
            attention=options.attention,
            during=self._memory.during,
        )
        self._optimizer: FlatAdamW | None = None
        self._is_loaded = False
        self._offloading = Offloading(self._state_by_tag, self._model.device, str(context), self._memory.during)

    def _count_pass_tokens(self) -> int:
        """Return the maximum number of padded tokens of one forward pass."""
        budget = self._options.tokens_per_microbatch
        if self._model.device.type != "cpu":
            return budget
        shape = ModelShape.of(self._model.config.get_text_config().to_dict())
        return min(budget, cpu_tokens(shape, self._model.dtype.itemsize))

    # Computing

    def forward(self, batch: Batch, outputs: Outputs) -> Batch:
        """Compute `outputs` without gradients for the tokens of `loss_mask`, or for all tokens if there is no mask."""
        self._offloading.need("params", to="compute")
        with self._memory.during(f"computing outputs of {len(batch)} rows"):
            return self._token_model.forward(batch, outputs)

    def forward_backward(self, batch: Batch, loss: LossSpec) -> Metrics:
        """Accumulate the gradient of `loss`, computed only from the tokens of `loss_mask`."""
        self._offloading.need("params", "grads", to="train")
        with self._memory.during(f"computing gradients of {len(batch)} rows"):
            optimizer = self._get_optimizer()
            metrics, weight = self._token_model.forward_backward(batch, loss)
        optimizer.count(weight)
        return metrics

    def optim_step(self) -> Metrics:
        """Reduce gradients over the ranks and take an AdamW step, as `FlatAdamW.step` says."""
        self._offloading.need(*TAGS, to="take a step")
        with self._memory.during("taking an optimizer step"):
            optimizer = self._get_optimizer()
            # The memory of earlier passes goes back to the system before a large model's step.
            if self._model.device.type == "cpu" and optimizer.sums.nbytes > LITTLE_BYTES:
                give_back_freed_memory()
            return optimizer.step()

    def _get_optimizer(self) -> FlatAdamW:
        """Return the optimizer, built at first use because its buffers are as large as the model."""
        if self._optimizer is None:
            values = self._values if self._values is not None else self._float32_values()
            self._optimizer = FlatAdamW(self._trained_parameters(), self._options, self._ranks.world_size, values)
        return self._optimizer

    def _float32_values(self) -> torch.Tensor:
        """Return the values that training of half-precision parameters begins from; collective.

        If the model's directory is more precise than the parameters, these are its own values: a weight that begins
        from the rounded value changes only after steps of half its precision.
        """
        parameters = self._trained_parameters()
        values = gather_values(parameters, self._options)

        def take_precise() -> None:
            exact = dict(load_model(replace(self._spec, dtype="float32"), "cpu").named_parameters())
            places, _ = lay_out(parameters, self._options)
            with torch.no_grad():
                for name, (start, size) in places.items():
                    values[start : start + size] = exact[name].reshape(-1)

        if not self._is_loaded and has_other_dtype(Path(self._spec.path), self._spec.dtype):
            self._ranks.on_rank_zero(take_precise)
            self._ranks.broadcast([values])
        return values

    def _trained_parameters(self) -> dict[str, torch.nn.Parameter]:
        return {name: p for name, p in self._model.named_parameters() if p.requires_grad}

    # Memory

    def offload(self, tags: tuple[str, ...] = ALL) -> None:
        """Offload state, as `Offloading.offload` says."""
        self._offloading.offload(tags)

    def onload(self, tags: tuple[str, ...] = ALL) -> None:
        """Load state back, as `Offloading.onload` says."""
        self._offloading.onload(tags)

    def _state_by_tag(self) -> dict[Tag, Iterable[torch.Tensor]]:
        parameters, optimizer = list(self._model.parameters()), self._optimizer
        gradients = [p.grad for p in parameters if p.grad is not None]
        if optimizer is None:
            return {"params": parameters, "grads": gradients, "optimizer": ()}
        return {"params": parameters, "grads": [*gradients, optimizer.sums], "optimizer": optimizer.tensors()}

    # Weights and files

    def weight_source(self) -> ReplicatedWeights:
        """Return access to the current weights under their Hugging Face names, with each tied weight once. Every rank
        holds all weights."""
        self._offloading.need("params", to="give weights")
        return ReplicatedWeights(self._model, self._stored, self._holding.form)

    def save(self, path: str, what: tuple[str, ...] = ALL) -> None:
        """Write `"model"`, `"optimizer"` (with the schedule) and `"rng"`, completely or not at all; collective.

        Raises:
            CheckpointError: the checkpoint cannot be written.
        """
        checkpoint.save(path, self._train_state(what), self._ranks)

    def load(self, path: str, what: tuple[str, ...] = ALL) -> None:
        """Load a checkpoint of any torch engine, with any number of ranks; collective.

        A rank without a random state in the checkpoint keeps its own.

        Raises:
            CheckpointError: the checkpoint is missing, incomplete, damaged or of another model, or lacks a part.
        """
        self._is_loaded |= "model" in parts_of(what)
        checkpoint.load(path, self._train_state(what), self._ranks)
        if self._optimizer is not None:
            self._optimizer.publish()

    def _train_state(self, what: tuple[str, ...]) -> checkpoint.TrainState:
        """Return the tensors that the parts of a checkpoint are written from, or loaded into. For a half-precision
        parameter this is its float32 copy."""
        self._offloading.need(*TAGS, to="save or load")
        parts = parts_of(what)
        copied = "model" in parts and self._spec.dtype != "float32" and bool(self._trained_parameters())
        optimizer = self._get_optimizer() if "optimizer" in parts or copied else self._optimizer
        model = None
        if "model" in parts:
            copies = {} if optimizer is None else optimizer.float32_copies()
            parameters = dict(self._model.named_parameters(remove_duplicate=False))
            model = {
                name: copies.get(parameters[name], tensor) if name in parameters else tensor
                for name, tensor in unique_state(self._model, self._stored).items()
            }
        return checkpoint.TrainState(model, optimizer if "optimizer" in parts else None, rng="rng" in parts)

    def export_hf(self, path: str) -> None:
        """Write a Hugging Face directory with everything that the model's own directory has (`Holding`); collective."""
        self._offloading.need("params", to="export the model")

        def write() -> None:
            directory = Path(path)
            directory.mkdir(parents=True, exist_ok=True)
            source = self.weight_source()
            if failure := write_weights(directory, source.metadata(), source.iter_full(), True, self._holding):
                raise failure
            with quiet_transformers():
                write_companions(
                    directory,
                    self._model.config,
                    self._model.generation_config if self._model.can_generate() else None,
                    self._model.dtype,
                    type(self._model).__name__,
                    self._spec,
                )

        self._ranks.on_rank_zero(write)

    def shutdown(self) -> None:
        """Release the model and leave the process group."""
        self._optimizer = self._values = None
        del self._model, self._token_model, self._offloading
        self._ranks.leave()
