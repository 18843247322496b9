"""Options of the `megatron` backend. Light to import: configs are checked before any engine is imported."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field

from enginehouse.engines.memory import MemoryDemand, MemoryUse
from enginehouse.engines.model import Device, ModelSpec
from enginehouse.engines.options import LoraOptions, TrainOptions
from enginehouse.errors import ConfigError
from enginehouse.plugin.records import ResolveError, resolve
from enginehouse_megatron.axes import axis_sizes
from enginehouse_megatron.check_model import (
    check_adapters,
    check_divided,
    check_experts,
    check_known,
    check_router,
    name_architecture,
    number_of_experts,
)
from enginehouse_megatron.memory_estimate import memory_use


def has_transformer_engine() -> bool:
    """Return True if transformer-engine is installed. megatron-core cannot tell, because it uses mocks in its place."""
    return importlib.util.find_spec("transformer_engine") is not None


class MegatronOptions(TrainOptions):
    """Options of the `megatron` training engine. `native` goes to megatron-core's `TransformerConfig`."""

    tensor_parallel: int = Field(
        1, gt=0, description="Number of ranks that split each matrix. These ranks see the same rows."
    )
    pipeline_parallel: int = Field(
        1,
        gt=0,
        description="Number of ranks among which the layers are divided, so that a row passes them one after another",
    )
    virtual_stages: int = Field(
        1,
        gt=0,
        description="Number of parts of the layers that each pipeline rank holds. More parts mean shorter waits and "
        "more communication.",
    )
    context_parallel: int = Field(
        1,
        gt=0,
        description="Number of ranks that split each sequence, for long sequences. These ranks see the same rows.",
    )
    expert_parallel: int = Field(
        1,
        gt=0,
        description="Number of ranks among which the experts of each layer are divided, independent of the other "
        "splits",
    )
    sequence_parallel: bool = Field(
        True, description="With tensor_parallel, also split the activations between the split matrices, by tokens"
    )
    recompute: Literal["none", "full"] | None = Field(
        None,
        description="Recomputation of activations. full: keep only the input of each layer and compute the rest "
        "again, which saves memory and costs time; none: keep all. Unset: full on GPUs, none on CPUs.",
    )
    architecture: str = Field(
        "auto",
        description="Mapping between the names of the model's weights and megatron's. auto: by the model's "
        "model_type. Otherwise module:NAME of an Architecture.",
    )

    lora: LoraOptions | None = Field(
        None,
        description="Low-rank adapters of linear layers, {rank, alpha, targets}, which are trained instead of the "
        "model. Unset: the whole model is trained. The output layer, and models with experts, cannot have adapters.",
    )

    def for_device(self, device: Device) -> Self:
        if self.recompute is not None:
            return self
        return self.model_copy(update={"recompute": "full" if device == "cuda" else "none"})

    def check_device(self, device: Device, dtype: str) -> None:
        """Reject float32 on a GPU with transformer-engine, which has no float32 attention for packed sequences."""
        if dtype == "float32" and device == "cuda" and has_transformer_engine():
            raise ConfigError(
                "megatron: on GPUs this engine uses layers of transformer-engine, which is installed here and has no "
                "attention in float32 for packed sequences: set model.dtype=bfloat16"
            )

    def check(self, processes: int) -> None:
        """Check that the number of processes is divisible by the sizes of the axes."""
        axis_sizes(processes, self)

    def check_model(self, config: Mapping[str, Any]) -> None:
        """Check that the model's architecture is known, and that its sizes are divisible by the sizes of the axes."""
        if "model_type" in config:
            reference = name_architecture(config["model_type"], self.architecture)
            if self.architecture != "auto":  # the user's own module, which the plan imports as it imports rewards
                try:
                    resolve(reference)
                except ResolveError as error:
                    raise ConfigError(f"megatron: architecture: {error}") from error
        experts = number_of_experts(config)
        # Only the engine knows which layers have no experts, and therefore a feed-forward part to divide.
        check_divided(config if not experts else {**config, "intermediate_size": None}, self)
        check_adapters(experts, self)
        if self.architecture == "auto":  # another architecture may count experts under another name
            check_experts(experts, self)
            check_router(config if experts else {})

    def check_files(self, model: ModelSpec) -> Sequence[str]:
        """Check a model's config and the names in its files; return notes on what is not trained.

        Raises:
            ModelError: The engine does not support the model, or the model's files hold tensors that have no name in
                its architecture.
            ConfigError: The model lacks the layers to adapt.
        """
        from enginehouse.weights.names import stored_shapes
        from enginehouse_megatron.architectures import find_architecture
        from enginehouse_torch.modeling.loading import check_kind

        config = check_kind(model).get_text_config()
        check_known(config, model.path)
        architecture = find_architecture(config.model_type, self.architecture)
        shapes = stored_shapes(Path(model.path))
        read = architecture.reads(shapes.keys(), config.num_hidden_layers)
        if self.lora is not None:
            architecture.choose_layers(self.lora, {name: shapes[name] for name in shapes if name in read}, config)
        return architecture.held(model, read, tied=bool(config.tie_word_embeddings)).notes()

    def memory(self, demand: MemoryDemand) -> MemoryUse | None:
        """Estimate the memory of a rank, or return None if ranks divide the experts."""
        return memory_use(self.for_device(demand.device), demand) if self.expert_parallel == 1 else None
