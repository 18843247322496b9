"""Options of the `megatron` backend. Light to import: configs are checked before any engine is imported."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

from pydantic import Field

from enginehouse.engines.memory import MemoryDemand, MemoryUse
from enginehouse.engines.model import Device, ModelSpec
from enginehouse.engines.options import TrainOptions
from enginehouse.errors import ConfigError
from enginehouse.plugin.records import ResolveError, resolve
from enginehouse_megatron.axes import axis_sizes
from enginehouse_megatron.check_model import (
    check_divided,
    check_experts,
    check_router,
    named_architecture,
    number_of_experts,
)
from enginehouse_megatron.memory_estimate import memory_use


def has_transformer_engine() -> bool:
    """Whether transformer-engine is installed.

    Never asked of megatron-core: without transformer-engine its wrappers of it are mocks that import well.
    """
    return importlib.util.find_spec("transformer_engine") is not None


class MegatronOptions(TrainOptions):
    """Options of the `megatron` training engine. `native` goes to megatron-core's `TransformerConfig`."""

    tensor_parallel: int = Field(1, gt=0, description="Ranks that split each matrix; they see the same rows")
    pipeline_parallel: int = Field(
        1, gt=0, description="Ranks that hold one part of the layers each, one after another"
    )
    virtual_stages: int = Field(
        1, gt=0, description="Parts of the layers each pipeline rank holds: shorter waits, more communication"
    )
    context_parallel: int = Field(
        1, gt=0, description="Ranks that split each sequence, for long ones; they see the same rows"
    )
    expert_parallel: int = Field(
        1,
        gt=0,
        description="Ranks that share out each layer's experts, whatever else they split",
    )
    sequence_parallel: bool = Field(
        True, description="With tensor_parallel: split what lies between the split matrices by tokens, too"
    )
    recompute: Literal["none", "full"] | None = Field(
        None,
        description="full: keep only each layer's input and compute the rest again: less memory, more time; unset: "
        "full on GPUs, none on CPUs",
    )
    architecture: str = Field(
        "auto",
        description="How the model's weights are called: auto: by its model_type; or module:NAME of an Architecture",
    )

    def for_device(self, device: Device) -> Self:
        """See `EngineOptions.for_device`."""
        if self.recompute is not None:
            return self
        return self.model_copy(update={"recompute": "full" if device == "cuda" else "none"})

    def check_device(self, device: Device, dtype: str) -> None:
        """See `EngineOptions.check_device`: transformer-engine attends to packed sequences in half precision alone."""
        if dtype == "float32" and device == "cuda" and has_transformer_engine():
            raise ConfigError(
                "megatron: on GPUs its layers are those of transformer-engine, which is installed here and has no "
                "attention in float32 for packed sequences: set model.dtype=bfloat16"
            )

    def check(self, processes: int) -> None:
        """See `EngineOptions.check`: the axes asked for have to divide the processes."""
        axis_sizes(processes, self)

    def check_model(self, config: Mapping[str, Any]) -> None:
        """See `EngineOptions.check_model`: its architecture has to be known, and the axes to divide it."""
        if "model_type" in config:
            reference = named_architecture(config["model_type"], self.architecture)
            if self.architecture != "auto":  # the user's own module, which the plan imports as it does a reward's
                try:
                    resolve(reference)
                except ResolveError as error:
                    raise ConfigError(f"megatron: architecture: {error}") from error
        experts = number_of_experts(config)
        # Which layers have none, and so a feed-forward part to divide, the engine knows.
        check_divided(config if not experts else {**config, "intermediate_size": None}, self)
        if self.architecture == "auto":  # else its experts may be counted under another name
            check_experts(experts, self)
            check_router(config if experts else {})

    def check_files(self, model: ModelSpec) -> Sequence[str]:
        """See `EngineOptions.check_files`: megatron-core has its layers, and its architecture reads the files."""
        from enginehouse_megatron.examining import examine

        return examine(self, model)

    def memory(self, demand: MemoryDemand) -> MemoryUse | None:
        """See `EngineOptions.memory`; None where experts are shared out."""
        return memory_use(self.for_device(demand.device), demand) if self.expert_parallel == 1 else None
