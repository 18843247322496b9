"""The axes along which ranks are laid out. Light to import, for checks of a config's options."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from enginehouse.engines.options import check_divides
from enginehouse.errors import ConfigError

if TYPE_CHECKING:
    from enginehouse_fsdp.options import FSDPOptions

REPLICATE, SHARD, CONTEXT, TENSOR = "dp_replicate", "dp_shard", "cp", "tp"

SPLIT_BY_HEADS = frozenset({"llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"})
"""Models (`model_type`) whose tensor-parallel plan splits queries, keys and values by heads."""


def axis_sizes(world_size: int, options: FSDPOptions) -> dict[str, int]:
    """Return the number of ranks of each axis, outermost first, without unused axes except `dp_shard`.

    Raises:
        ConfigError: the options do not divide the ranks.
    """
    sizes = {REPLICATE: options.replicas, CONTEXT: options.context_parallel, TENSOR: options.tensor_parallel}
    if world_size % options.replicas:
        raise ConfigError(
            f"fsdp: {world_size} rank(s) cannot hold {options.replicas} replicas: "
            "replicas must divide the number of ranks"
        )
    ranks_left = world_size // options.replicas
    for name, ranks in (("tensor_parallel", options.tensor_parallel), ("context_parallel", options.context_parallel)):
        check_divides(f"fsdp: {name}", ranks, ranks_left, f"the {ranks_left} rank(s) that are left for it")
        ranks_left //= ranks
    sizes[SHARD] = world_size // math.prod(sizes.values())
    return {axis: sizes[axis] for axis in (REPLICATE, SHARD, CONTEXT, TENSOR) if axis == SHARD or sizes[axis] > 1}


def check_heads(config: Mapping[str, Any], options: FSDPOptions) -> None:
    """Check that the axes divide a model's heads, as far as its config shows.

    Raises:
        ConfigError: an axis does not divide the number of heads; the message names the nearest divisor.
    """
    tensor = options.tensor_parallel
    heads, groups = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if config.get("model_type") in SPLIT_BY_HEADS:
        for count, what in ((heads, "attention heads"), (groups, "key-value heads")):
            if count:
                check_divides("fsdp: tensor_parallel", tensor, count, f"the model's {count} {what}")
    if groups and options.context_parallel > 1:
        heads_per_rank = groups // tensor
        check_divides(
            "fsdp: context_parallel",
            options.context_parallel,
            heads_per_rank,
            f"the {heads_per_rank} key-value head(s) of a rank",
        )
