"""Options of the `fsdp` backend. Light to import: configs are checked before any engine is imported."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from enginehouse.engines.options import TrainOptions


class FSDPOptions(TrainOptions):
    """Options of the `fsdp` training engine. `native` goes to `torch.distributed.fsdp.fully_shard`, for every block."""

    replicas: int = Field(
        1, gt=0, description="Copies of the sharded model (hybrid sharding): ranks / replicas ranks share one"
    )
    reshard_after_forward: bool = Field(
        True, description="Free a block's whole parameters after its forward pass, and gather them again to go back"
    )
    reduce_dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="In which dtype half-precision gradients are summed over ranks"
    )
    activation_checkpointing: bool = Field(
        False, description="Keep only each block's input and compute the rest again going back: less memory, more time"
    )
    cpu_offload: bool = Field(
        False, description="Keep parameters, gradients and optimizer state in host memory between uses"
    )
    compile: bool = Field(False, description="torch.compile each block: slow to start, quicker to run")
    share_prompts: Literal["auto", "never"] = Field(
        "auto", description="auto: rows that begin with the same prompt compute it once, where that costs less"
    )
