"""The `fsdp` training engine: any Hugging Face causal LM, sharded over its ranks by PyTorch's FSDP2."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from enginehouse.engines.mesh import Mesh
from enginehouse.engines.model import NO_FLOAT16
from enginehouse.engines.train import ALL, LossSpec, Metrics, Outputs
from enginehouse.errors import EnginehouseError, ModelError
from enginehouse.quiet import quiet_transformers
from enginehouse.weights.names import stored_names, unique_state
from enginehouse_fsdp import adapters
from enginehouse_fsdp.axes import axis_sizes
from enginehouse_fsdp.context_parallel import split_sequences
from enginehouse_fsdp.optimizer import ShardedAdamW
from enginehouse_fsdp.sharded_weights import ShardedWeights
from enginehouse_fsdp.sharding import (
    build_sharded_model,
    context_group,
    device_mesh,
    forget_meshes,
    reshard,
    unsharded_class,
)
from enginehouse_torch.modeling import checkpoint, export
from enginehouse_torch.modeling.adapters import describe_no_export, write_adapter
from enginehouse_torch.modeling.files import parts_of
from enginehouse_torch.modeling.memory import MemoryGuard
from enginehouse_torch.modeling.offloading import TAGS, Offloading, Tag
from enginehouse_torch.modeling.ranks import Ranks, device_of
from enginehouse_torch.modeling.schedule import learning_rate
from enginehouse_torch.modeling.token_model import TokenModel

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from enginehouse.data import Batch
    from enginehouse.engines.model import ModelSpec, ProcessContext
    from enginehouse_fsdp.options import FSDPOptions

NEEDS_LESS = (
    "a smaller tokens_per_microbatch",
    "activation_checkpointing=true",
    "cpu_offload=true",
    "reshard_after_forward=true (the default)",
    "fewer replicas, or more processes (actor.processes): each holds a smaller part",
)
"""Advice for a rank that runs out of memory."""


class FSDPEngine:
    """`TrainEngine` on FSDP2 (`enginehouse.engines.train`), one object per rank.

    Parameters and optimizer state are float32 shards. A model of a half-precision dtype computes in that dtype
    (`MixedPrecisionPolicy`), and its weights are sent in it.
    """

    mesh: Mesh

    def setup(self, model: ModelSpec, options: FSDPOptions, context: ProcessContext) -> None:
        """Join the ranks, and build, shard and load the model. Optimizer state is allocated at first use.

        Raises:
            ModelError: the model cannot be loaded, or is to be trained in float16.
            ConfigError: the schedule decays and `total_steps` is not set, a pattern of `lr_groups` matches nothing, or
                ranks, model and axes do not fit.
        """
        options = options.for_device(context.device)
        learning_rate(options.warmup_steps, options)
        if model.dtype == "float16":
            raise ModelError(f"fsdp: {NO_FLOAT16}")
        self._spec, self._options, self._context = model, options, context
        device = device_of(context)
        self._ranks = Ranks.join(context, alone=True)
        with self._ranks.left_if_alone():
            self._build(device)

    def _build(self, device: torch.device) -> None:
        """Build, shard and load the model on the joined ranks."""
        model, options, context = self._spec, self._options, self._context
        self._background = checkpoint.BackgroundSave(self._ranks)
        sizes = axis_sizes(context.world_size, options)
        self.mesh = Mesh.of(sizes, context.rank)
        self._axes = device_mesh(device, sizes)
        self._memory = MemoryGuard(context, NEEDS_LESS)
        with self._memory.during("building and loading the model"):
            self._model, self._holding = build_sharded_model(model, options, self._axes, device)
        adapters.adapter_lr_factors(self._trained_parameters(), options)
        self._offloading = Offloading(self._state_by_tag, device, str(context), self._memory.during)
        self._stored = stored_names(Path(model.path))
        self._token_model = TokenModel(
            self._model,
            device=device,
            tokens_per_microbatch=options.tokens_per_microbatch,
            share_prompts=options.share_prompts == "auto",
            dtype=getattr(torch, model.dtype),
            attention=options.attention if options.context_parallel == 1 else "sdpa",
            passes=self._ranks.largest,
            during=self._memory.during,
        )
        if options.context_parallel > 1:
            self._token_model.token_outputs = split_sequences(self._model, context_group(device, sizes))
        reshard(self._model)  # trying out the attention has gathered it
        self._optimizer: ShardedAdamW | None = None

    def forward(self, batch: Batch, outputs: Outputs) -> Batch | None:
        """Compute `outputs` without gradients for the tokens of `loss_mask`, or for all tokens if there is no mask.

        Return None on a rank whose results another rank returns: ranks that split matrices compute the same results.
        """
        self._offloading.need("params", to="compute")
        try:
            with self._memory.during(f"computing outputs of {len(batch)} rows"):
                result = self._token_model.forward(batch, outputs)
            return result if self.mesh.is_output_rank else None
        finally:
            reshard(self._model)  # otherwise only a backward pass would free what was gathered, and none follows

    def forward_base(self, batch: Batch, outputs: Outputs) -> Batch | None:
        """Compute `forward` without adapters."""
        with adapters.disable_adapters(self._model):
            return self.forward(batch, outputs)

    def forward_backward(self, batch: Batch, loss: LossSpec) -> Metrics:
        """Accumulate the gradient of `loss`, computed only from the tokens of `loss_mask`."""
        self._offloading.need("params", "grads", to="train")
        optimizer = self._get_optimizer()
        with self._memory.during(f"computing gradients of {len(batch)} rows"):
            metrics, weight = self._token_model.forward_backward(batch, loss)
        answers = self.mesh.is_output_rank  # other ranks see the same rows, which must count once
        optimizer.count(weight if answers else 0.0)
        return metrics if answers else {}

    def optim_step(self) -> Metrics:
        """Normalise, clip and take an AdamW step, as `ShardedAdamW.step` says."""
        self._offloading.need(*TAGS, to="take a step")
        with self._memory.during("taking an optimizer step"):
            return self._get_optimizer().step()

    def _get_optimizer(self) -> ShardedAdamW:
        """Return the optimizer, built at first use because its state is twice as large as the model."""
        if self._optimizer is None:
            trained = self._trained_parameters()
            self._optimizer = ShardedAdamW(trained, self._options, adapters.adapter_lr_factors(trained, self._options))
        return self._optimizer

    def _trained_parameters(self) -> dict[str, torch.nn.Parameter]:
        return {name: p for name, p in self._model.named_parameters() if p.requires_grad}

    # Memory

    def offload(self, tags: tuple[str, ...] = ALL) -> None:
        """Offload state, as `Offloading.offload` says. With `cpu_offload`, state that is in host memory stays there."""
        self._offloading.offload(tags)

    def onload(self, tags: tuple[str, ...] = ALL) -> None:
        """Load state back, as `Offloading.onload` says."""
        self._offloading.onload(tags)

    def _state_by_tag(self) -> dict[Tag, Iterable[torch.Tensor]]:
        parameters = list(self._model.parameters())
        gradients = [p.grad for p in parameters if p.grad is not None]
        moments = () if self._optimizer is None else self._optimizer.tensors()
        return {"params": parameters, "grads": gradients, "optimizer": moments}

    # Weights and files

    def weight_source(self) -> ShardedWeights:
        """Return access to the current weights under their Hugging Face names, with each tied weight once."""
        self._offloading.need("params", to="give weights")
        dtype, lora = getattr(torch, self._spec.dtype), self._options.lora
        alpha = 0.0 if lora is None else lora.alpha
        return ShardedWeights(self._model, self._axes, self._stored, self._holding.form, dtype, alpha=alpha)

    def adapter_source(self) -> adapters.AdapterWeights:
        """Return access to the current adapters, under the names of a `peft` file. Raises `EnginehouseError` if the
        model has none."""
        if self._options.lora is None:
            raise EnginehouseError(f"{self._context}: there is no adapter to send: the option lora is unset")
        self._offloading.need("params", to="give weights")
        return adapters.AdapterWeights(self._model, getattr(torch, self._spec.dtype))

    def save(self, path: str, what: tuple[str, ...] = ALL) -> None:
        """Write `"model"`, `"optimizer"` (with the schedule) and `"rng"`, completely or not at all; collective.

        Raises:
            CheckpointError: the checkpoint cannot be written, or a save in the background failed.
        """
        self._background.finish()
        checkpoint.save(path, self._train_state(what), self._ranks)

    def save_in_background(self, path: str, what: tuple[str, ...] = ALL) -> None:
        """Copy the state to host memory and write it while training continues (`SavesInBackground`); collective."""
        self._background.start(path, self._train_state(what))

    def finish_save(self) -> None:
        """Wait for the save in progress; collective.

        Raises:
            CheckpointError: the save failed.
        """
        self._background.finish()

    def load(self, path: str, what: tuple[str, ...] = ALL) -> None:
        """Load a checkpoint of any torch engine, with any number of ranks; collective.

        A rank without a random state in the checkpoint keeps its own.

        Raises:
            CheckpointError: the checkpoint is missing, incomplete, damaged or of another model, or lacks a part.
        """
        self._background.finish()
        state = self._train_state(what)

        def check(names: Sequence[str]) -> None:
            if state.model is not None:
                adapters.check_belongs(path, names, state.model)

        checkpoint.load(path, state, self._ranks, check)

    def _train_state(self, what: tuple[str, ...]) -> checkpoint.TrainState:
        """Return the tensors that the parts of a checkpoint are written from, or loaded into."""
        self._offloading.need(*TAGS, to="save or load")
        parts = parts_of(what)
        model = unique_state(self._model, self._stored)
        if self._options.lora is not None:
            model = adapters.select_trained(model, self._model, self._options.lora)
        return checkpoint.TrainState(
            model=model if "model" in parts else None,
            optimizer=self._get_optimizer() if "optimizer" in parts else None,
            rng="rng" in parts,
        )

    def export_hf(self, path: str) -> None:
        """Write a Hugging Face directory with everything that the model's own directory has (`Holding`); collective."""
        directory = Path(path)
        source = self.weight_source()
        self._ranks.on_rank_zero(lambda: directory.mkdir(parents=True, exist_ok=True))
        failure = export.write_weights(
            directory, source.metadata(), source.iter_full(), writes=self._ranks.rank == 0, held=self._holding
        )

        def finish() -> None:
            if failure is not None:
                raise failure
            with quiet_transformers():
                export.write_companions(
                    directory,
                    self._model.config,
                    self._model.generation_config if self._model.can_generate() else None,
                    getattr(torch, self._spec.dtype),
                    unsharded_class(self._model).__name__,
                    self._spec,
                )

        self._ranks.on_rank_zero(finish)

    def export_adapter(self, path: str) -> None:
        """Write the adapters, float32, in the format of `peft.PeftModel.from_pretrained`; collective.

        Raises:
            EnginehouseError: the model has no adapters, or has a value head, which the format cannot hold.
        """
        lora = self._options.lora
        if lora is None or self._spec.head == "value":
            raise EnginehouseError(describe_no_export(self._context, has_adapters=lora is not None))
        self._offloading.need("params", to="export the adapter")
        weights = dict(adapters.AdapterWeights(self._model, torch.float32).iter_full())
        layers, modules = adapters.adapted_layers(self._model), [name for name, _ in self._model.named_modules()]
        self._ranks.on_rank_zero(lambda: write_adapter(Path(path), lora, self._spec.path, layers, modules, weights))

    def shutdown(self) -> None:
        """Finish a save in progress, release the model and leave the process group."""
        self._background.close()
        self._optimizer = None
        del self._model, self._token_model, self._offloading, self._axes
        forget_meshes()
        self._ranks.leave()
