"""The axes along which ranks are laid out. Light to import, because a config's options are checked against them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from enginehouse.engines.options import check_divides
from enginehouse.errors import ConfigError

if TYPE_CHECKING:
    from enginehouse_megatron.options import MegatronOptions

PIPELINE, DATA, CONTEXT, TENSOR = "pp", "dp", "cp", "tp"
"""The axes, outermost first. This is megatron-core's order `tp-cp-ep-dp-pp`, which names the innermost axis first."""


def axis_sizes(world_size: int, options: MegatronOptions) -> dict[str, int]:
    """Return the number of ranks of each of the four axes, outermost first.

    Experts have no axis. Each group of `expert_parallel` neighbouring ranks of a pipeline stage distributes all experts
    over its ranks, whatever else these ranks split.

    Raises:
        ConfigError: The number of ranks is not divisible by the options, or `virtual_stages` is set without a pipeline.
    """
    if options.virtual_stages > 1 and options.pipeline_parallel == 1:
        raise ConfigError(
            f"megatron: virtual_stages={options.virtual_stages} needs a pipeline, but pipeline_parallel is 1: raise "
            "pipeline_parallel, or leave virtual_stages at 1"
        )
    ranks_left = world_size
    for name in ("tensor_parallel", "context_parallel", "pipeline_parallel"):
        ranks = getattr(options, name)
        check_divides(f"megatron: {name}", ranks, ranks_left, f"the {ranks_left} rank(s) that are left for it")
        ranks_left //= ranks
    check_divides(
        "megatron: expert_parallel",
        options.expert_parallel,
        stage := world_size // options.pipeline_parallel,
        f"the {stage} rank(s) of a pipeline stage",
    )
    return {
        PIPELINE: options.pipeline_parallel,
        DATA: ranks_left,
        CONTEXT: options.context_parallel,
        TENSOR: options.tensor_parallel,
    }
