"""The `megatron` training engine: decoders on megatron-core, split by matrices, layers, sequences and data."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from enginehouse_megatron import kernels

# isort: split
from megatron.core import parallel_state

from enginehouse.data import Batch
from enginehouse.engines.mesh import Mesh
from enginehouse.engines.model import NO_FLOAT16
from enginehouse.engines.train import ALL, LossSpec, Metrics, Outputs
from enginehouse.errors import ConfigError, EnginehouseError, ModelError
from enginehouse.quiet import quiet_transformers
from enginehouse_megatron import adapters, build, checkpoints, experts, on_cpu, parallel, weight_map
from enginehouse_megatron.architectures import Architecture, find_architecture
from enginehouse_megatron.axes import PIPELINE, axis_sizes
from enginehouse_megatron.forms import Heads
from enginehouse_megatron.forward import StagePasses
from enginehouse_megatron.split_weights import SplitWeights
from enginehouse_megatron.training import BufferedTraining
from enginehouse_torch.modeling import export
from enginehouse_torch.modeling.adapters import describe_no_export, write_adapter
from enginehouse_torch.modeling.files import parts_of
from enginehouse_torch.modeling.holding import VALUE_HEAD, has_other_dtype
from enginehouse_torch.modeling.loading import value_head_weight
from enginehouse_torch.modeling.memory import MemoryGuard
from enginehouse_torch.modeling.offloading import TAGS, Offloading, Tag
from enginehouse_torch.modeling.ranks import Ranks, device_of
from enginehouse_torch.modeling.schedule import learning_rate

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from megatron.core.transformer.transformer_config import TransformerConfig

    from enginehouse.engines.model import ModelSpec, ProcessContext
    from enginehouse.engines.options import LoraOptions
    from enginehouse_megatron.options import MegatronOptions

NEEDS_LESS = (
    "a smaller tokens_per_microbatch",
    "recompute=full",
    "a larger tensor_parallel or pipeline_parallel: each rank holds a smaller part of the model",
    "more processes (actor.processes): each holds a smaller part of the optimizer's state",
)
"""Advice if memory runs out."""


class MegatronEngine:
    """`TrainEngine` on megatron-core (`enginehouse.engines.train`), one object per rank."""

    mesh: Mesh

    def setup(self, model: ModelSpec, options: MegatronOptions, context: ProcessContext) -> None:
        """Join the ranks, build this rank's part of the model and read its weights. Training state is made when needed.

        Raises:
            ModelError: The model cannot be loaded, or has no architecture.
            ConfigError: The schedule decays and `total_steps` is not set; ranks, model and layout do not fit; the
                layers cannot compute in the model's dtype here; or a role that shares these processes has another
                layout.
        """
        options = options.for_device(context.device)
        options.check_device(context.device, model.dtype)
        learning_rate(options.warmup_steps, options)
        self._spec, self._options, self._context = model, options, context
        if model.dtype == "float16":
            raise ModelError(f"megatron: {NO_FLOAT16}")
        device = device_of(context)
        sizes = axis_sizes(context.world_size, options)
        self._config = build.model_config(model)
        architecture = find_architecture(self._config.model_type, options.architecture)
        on_cpu.adapt(device.type)
        if context.rank == 0:
            kernels.say_missing(device.type)
        settings = build.transformer_config(self._config, architecture, model, options, sizes, device.type)
        self._ranks = Ranks.join(context, alone=True)
        with self._ranks.left_if_alone():
            parallel.join(sizes, options.virtual_stages, options.expert_parallel)
            try:
                self._build(architecture, settings, sizes, device)
            except BaseException:
                parallel.leave()
                raise

    def _build(
        self, architecture: Architecture, settings: TransformerConfig, sizes: Mapping[str, int], device: torch.device
    ) -> None:
        model, options, context = self._spec, self._options, self._context
        self.mesh = Mesh.of(sizes, context.rank, output={PIPELINE: sizes[PIPELINE] - 1})
        self._sizes, self._settings = sizes, settings
        self._memory = MemoryGuard(context, NEEDS_LESS)
        with self._memory.during("building and loading the model"):
            self._models = build.model_parts(self._config, settings, model, device)
            self._load(architecture)
        self._offloading = Offloading(self._state_by_tag, device, str(context), self._memory.during)
        self._called = [build.callable_part(part, settings) for part in self._models]
        self._passes = StagePasses(
            settings=settings,
            vocabulary=self._config.vocab_size,
            has_values=model.head == "value",
            device=device,
            budget=options.tokens_per_microbatch,
            ranks=self._ranks,
            during=self._memory.during,
        )
        self._training: BufferedTraining | None = None

    def _load(self, architecture: Architecture) -> None:
        """Read this rank's weights, and learn which tensors the other ranks have; collective."""
        settings = self._settings
        groups = settings.num_query_groups or settings.num_attention_heads
        self._heads = Heads(settings.num_attention_heads // groups, settings.kv_channels)
        made = {}  # tensors that the files need not hold
        if self._spec.head == "value":
            made[f"{VALUE_HEAD}.weight"] = value_head_weight(settings.hidden_size, self._spec)
        self._architecture, self._made, self._is_loaded = architecture, made, False
        files = self._open_files()
        self._mapped = [
            mapped for part in self._models for mapped in weight_map.map_parameters(part, architecture, files)
        ]
        group = parallel_state.get_tensor_model_parallel_group()
        weight_map.load(self._mapped, files, self._heads, group.rank(), group.size())
        for part in self._models:
            part.setup_embeddings_and_output_layer()  # once more: gives the last stage the tied embedding
        self._stages = self._gather_stages(self._mapped)
        self._layers: list[str] = []
        self._adapters: list[weight_map.MappedParameter] = []
        if self._options.lora is not None:
            self._add_adapters(self._options.lora)
        read = {stored.name for stage in self._stages for stored in stage}
        self._held = architecture.held(self._spec, read, tied=bool(self._config.tie_word_embeddings))

    def _gather_stages(self, mapped: Sequence[weight_map.MappedParameter]) -> list[list[weight_map.StoredTensor]]:
        return weight_map.gather_stages(mapped, self._ranks, self._sizes[PIPELINE], self._options.expert_parallel)

    def _add_adapters(self, lora: LoraOptions) -> None:
        """Add adapters to the loaded model, and learn which adapters the other ranks have; collective."""
        stored = {tensor.name: tensor.shape for stage in self._stages for tensor in stage if tensor.split is not None}
        self._layers = self._architecture.choose_layers(lora, stored, self._config)
        for number, stage in enumerate(self._stages):
            if not any(tensor.name.removesuffix(".weight") in self._layers for tensor in stage):
                raise ConfigError(
                    f"megatron: lora.targets: stage {number} of the pipeline has no layer to adapt, so it would train "
                    "nothing: adapt layers of every stage, or lower pipeline_parallel"
                )
        adapted = adapters.add_adapters(
            self._models, self._mapped, self._layers, lora, self._settings, self._heads, self._spec.seed
        )
        self._mapped, self._adapters = adapted.base, adapted.adapters
        self._adapter_stages = self._gather_stages(self._adapters)

    def _open_files(self) -> weight_map.ModelFiles:
        return weight_map.ModelFiles(Path(self._spec.path), self._made)

    def forward(self, batch: Batch, outputs: Outputs) -> Batch | None:
        """Compute `outputs` without gradients, only for the tokens of `loss_mask` if the batch has one.

        Returns None on ranks whose results another rank returns.
        """
        self._offloading.need("params", to="compute")
        with self._memory.during(f"computing outputs of {len(batch)} rows"):
            for part in self._models:
                part.eval()
            columns = self._passes.forward(self._called, batch, outputs)
        return columns if self.mesh.is_output_rank else None

    def forward_base(self, batch: Batch, outputs: Outputs) -> Batch | None:
        """Compute `forward` without adapters."""
        with adapters.disable_adapters(self._models):
            return self.forward(batch, outputs)

    def forward_backward(self, batch: Batch, loss: LossSpec) -> Metrics:
        """Accumulate the gradient of `loss`, computed only from the tokens of `loss_mask`."""
        self._offloading.need("params", "grads", to="train")
        with self._memory.during(f"computing gradients of {len(batch)} rows"):
            training = self._get_training()
            for part in self._models:
                part.train()  # without dropout this only enables recomputing of activations
            with training.accumulating():
                metrics, weight = self._passes.forward_backward(training.models, batch, loss)
        answers = self.mesh.is_output_rank  # other ranks see the same rows, which are counted once
        training.count(weight if answers else 0.0)
        return metrics if answers else {}

    def optim_step(self) -> Metrics:
        """Normalise, clip and take one AdamW step; see `BufferedTraining.step`."""
        self._offloading.need(*TAGS, to="take a step")
        with self._memory.during("taking an optimizer step"):
            return self._get_training().step()

    def _get_training(self) -> BufferedTraining:
        """Return gradients and optimizer, made at first use because they are several times as large as the model."""
        if self._training is None:
            training = BufferedTraining(self._called, self._settings, self._options, self._own_weights)
            path = Path(self._spec.path)
            trains_all = self._options.lora is None
            if trains_all and self._settings.bf16 and not self._is_loaded and has_other_dtype(path, self._spec.dtype):
                self._take_precise_values(training)
            self._training = training
        return self._training

    def _take_precise_values(self, training: BufferedTraining) -> None:
        """Let training begin from the files' values, which are more precise than the parameters.

        A weight that begins from the rounded value changes only after steps of half its precision.
        """
        files = self._open_files()
        mapped = {
            entry.parameter: entry
            for part in self._models
            for entry in weight_map.map_parameters(part, self._architecture, files, copies=True)
        }
        group = parallel_state.get_tensor_model_parallel_group()
        rank, size = group.rank(), group.size()
        training.take_values(
            lambda parameter: weight_map.read(mapped[parameter], files, self._heads, rank, size, torch.float32)
        )

    def _own_weights(self) -> dict[str, torch.Tensor]:
        """Return this rank's part of each weight by its Hugging Face name, as a view if possible."""
        return dict(self.weight_source().iter_local())

    def offload(self, tags: tuple[str, ...] = ALL) -> None:
        self._offloading.offload(tags)

    def onload(self, tags: tuple[str, ...] = ALL) -> None:
        self._offloading.onload(tags)

    def _state_by_tag(self) -> dict[Tag, Iterable[torch.Tensor]]:
        training = self._training
        return {
            "params": [parameter for part in self._models for parameter in part.parameters()],
            "grads": () if training is None else training.gradients(),
            "optimizer": () if training is None else training.optimizer_state(),
        }

    def weight_source(self) -> SplitWeights:
        """Return access to the current weights under their Hugging Face names, with each tied weight once."""
        self._offloading.need("params", to="give weights")
        return SplitWeights(self._mapped, self._stages, self._heads, self._sizes, getattr(torch, self._spec.dtype))

    def adapter_source(self) -> SplitWeights:
        """Return access to the current adapters, under the names of a `peft` file. Raises `EnginehouseError` if the
        model has none."""
        if self._options.lora is None:
            raise EnginehouseError(f"{self._context}: there is no adapter to send: the option lora is unset")
        return self._read_adapters(getattr(torch, self._spec.dtype))

    def _read_adapters(self, dtype: torch.dtype) -> SplitWeights:
        self._offloading.need("params", to="give weights")
        return SplitWeights(self._adapters, self._adapter_stages, self._heads, self._sizes, dtype)

    def save(self, path: str, what: tuple[str, ...] = ALL) -> None:
        """Write `"model"`, `"optimizer"` (with the schedule) and `"rng"`, completely or not at all; collective."""
        checkpoints.save(path, self._describe_content(what), self._ranks)

    def load(self, path: str, what: tuple[str, ...] = ALL) -> None:
        """Load what `save` wrote in any layout; collective. A rank without a saved random state keeps its own."""
        self._is_loaded |= "model" in parts_of(what)
        checkpoints.load(path, self._describe_content(what), self._ranks)

    def _describe_content(self, what: tuple[str, ...]) -> checkpoints.CheckpointContent:
        self._offloading.need(*TAGS, to="save or load")
        parts = parts_of(what)
        training = self._get_training() if "optimizer" in parts else self._training
        config = self._config
        shape = {
            name: getattr(config, name)
            for name in ("model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size")
        }
        shape |= {"experts": self._settings.num_moe_experts, "head": self._spec.head}
        trained = None
        if (lora := self._options.lora) is not None:
            trained = [*self._adapters, *(entry for entry in self._mapped if entry.parameter.requires_grad)]
            shape |= {"lora.alpha": lora.alpha, "lora.rank": lora.rank, "adapted layers": self._describe_layers()}
        return checkpoints.CheckpointContent(self._models, training, parts, shape, trained)

    def _describe_layers(self) -> str:
        """Return the number of adapted layers, the ends of their names and a digest of the names."""
        ends = ", ".join(sorted({name.rpartition(".")[2] for name in self._layers}))
        digest = hashlib.sha256(" ".join(self._layers).encode()).hexdigest()[:8]
        return f"{len(self._layers)} of {ends} ({digest})"

    def export_hf(self, path: str) -> None:
        """Write a Hugging Face directory with everything that the model's own directory has (`Holding`); collective."""
        directory, source = Path(path), Path(self._spec.path)
        weights = self.weight_source()
        self._ranks.on_rank_zero(lambda: directory.mkdir(parents=True, exist_ok=True))
        failure = export.write_weights(
            directory, weights.metadata(), weights.iter_full(), writes=self._ranks.rank == 0, held=self._held
        )

        def finish() -> None:
            if failure is not None:
                raise failure
            from transformers import AutoConfig, GenerationConfig

            with quiet_transformers():
                config = AutoConfig.from_pretrained(str(source), trust_remote_code=self._spec.trust_remote_code)
                generation = None
                if (source / "generation_config.json").is_file():
                    generation = GenerationConfig.from_pretrained(str(source))
                (architecture, *_) = config.architectures or [""]
                dtype = getattr(torch, self._spec.dtype)
                export.write_companions(directory, config, generation, dtype, architecture, self._spec)

        self._ranks.on_rank_zero(finish)

    def export_adapter(self, path: str) -> None:
        """Write the adapters as float32 in the format of `peft.PeftModel.from_pretrained`; collective.

        Raises:
            EnginehouseError: The model has no adapters, or has a value head, which the format cannot hold.
        """
        lora = self._options.lora
        if lora is None or self._spec.head == "value":
            raise EnginehouseError(describe_no_export(self._context, has_adapters=lora is not None))
        weights = dict(self._read_adapters(torch.float32).iter_full())
        modules = [tensor.name.removesuffix(".weight") for stage in self._stages for tensor in stage]
        self._ranks.on_rank_zero(
            lambda: write_adapter(Path(path), lora, self._spec.path, self._layers, modules, weights)
        )

    def shutdown(self) -> None:
        """Release the model and leave the process group."""
        self._training = None
        for part in self._models:
            experts.release(part)
        del self._models, self._called, self._passes, self._mapped, self._offloading
        self._adapters = []
        parallel.leave()
        self._ranks.leave()
