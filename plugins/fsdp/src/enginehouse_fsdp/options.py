"""Options of the `fsdp` backend. Light to import: configs are checked before any engine is imported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

from pydantic import Field

from enginehouse.engines.memory import MemoryDemand, MemoryUse
from enginehouse.engines.model import Device, ModelSpec
from enginehouse.engines.options import LoraOptions
from enginehouse.errors import ConfigError
from enginehouse_fsdp.axes import axis_sizes, check_heads
from enginehouse_fsdp.memory_plan import memory_use
from enginehouse_torch.options import PackingOptions


class FSDPOptions(PackingOptions):
    """Options of the `fsdp` training engine. `native` goes to `torch.distributed.fsdp.fully_shard`, for every block."""

    replicas: int = Field(
        1,
        gt=0,
        description="Number of copies of the sharded model (hybrid sharding). Each copy is shared by ranks / "
        "replicas ranks.",
    )
    tensor_parallel: int = Field(
        1,
        gt=0,
        description="Number of ranks that split each matrix, by the plan that the model brings along. These ranks "
        "see the same rows.",
    )
    context_parallel: int = Field(
        1,
        gt=0,
        description="Number of ranks that split each sequence (Ulysses), for long sequences. These ranks see the "
        "same rows.",
    )
    reshard_after_forward: bool = Field(
        True,
        description="Free the gathered parameters of a block after its forward pass, and gather them again for the "
        "backward pass",
    )
    reduce_dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Dtype in which half-precision gradients are summed over ranks"
    )
    activation_checkpointing: bool | None = Field(
        None,
        description="Keep only the input of each block and compute the rest again in the backward pass, which saves "
        "memory and costs time. Unset: on GPUs only.",
    )
    cpu_offload: bool = Field(
        False, description="Keep parameters, gradients and optimizer state in host memory between uses"
    )
    compile: bool = Field(
        False,
        description="Compile each block with torch.compile, once for all lengths. On a CPU the start takes minutes "
        "longer; steps are faster.",
    )
    lora: LoraOptions | None = Field(
        None,
        description="Low-rank adapters of linear layers, {rank, alpha, targets}, which are trained instead of the "
        "model. Unset: the whole model is trained.",
    )

    def for_device(self, device: Device) -> Self:
        """Resolve `activation_checkpointing` for a device."""
        if self.activation_checkpointing is not None:
            return self
        return self.model_copy(update={"activation_checkpointing": device == "cuda"})

    def check(self, processes: int) -> None:
        """Check that the number of processes is divisible by the sizes of the axes. If ranks split sequences, also
        check that the option `attention` allows that."""
        axis_sizes(processes, self)
        if self.context_parallel > 1 and self.attention not in ("auto", "sdpa"):
            raise ConfigError(
                f"attention={self.attention} does not support sequences that are split over ranks "
                f"(context_parallel={self.context_parallel}); use attention=auto, or context_parallel=1"
            )

    def check_model(self, config: Mapping[str, Any]) -> None:
        """Check that the model's number of attention heads is divisible by the axes that split heads."""
        check_heads(config, self)

    def check_files(self, model: ModelSpec) -> Sequence[str]:
        """Check the model as the torch engine does. Also check that the model's attention supports split sequences, and
        that the model has the layers to adapt, if the options ask for that."""
        from enginehouse_fsdp.examining import examine_for

        return examine_for(self, model)

    def memory(self, demand: MemoryDemand) -> MemoryUse:
        """Estimate the memory of a rank."""
        return memory_use(self.for_device(demand.device), demand)
