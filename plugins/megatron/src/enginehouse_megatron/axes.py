"""The axes that ranks are laid out along. Light to import: a config's options are checked against them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from enginehouse.engines.options import check_divides
from enginehouse.errors import ConfigError

if TYPE_CHECKING:
    from enginehouse_megatron.options import MegatronOptions

PIPELINE, DATA, CONTEXT, TENSOR = "pp", "dp", "cp", "tp"
"""Outermost first: the order `tp-cp-ep-dp-pp` of megatron-core, which counts the first axis fastest."""


def axis_sizes(world_size: int, options: MegatronOptions) -> dict[str, int]:
    """How many ranks each axis has, outermost first, all four of them.

    Experts are no axis of their own: `expert_parallel` neighbours of a pipeline stage share them out, whatever else
    they split, and as many such groups as a stage has hold the same.

    Raises:
        ConfigError: the ranks cannot be divided so, or a pipeline is spoken of that there is not.
    """
    if options.virtual_stages > 1 and options.pipeline_parallel == 1:
        raise ConfigError(
            f"megatron: virtual_stages={options.virtual_stages} divides the layers of a pipeline rank, and there is no "
            "pipeline: set pipeline_parallel, or leave virtual_stages at 1"
        )
    each = world_size
    asked = (
        ("tensor_parallel", options.tensor_parallel),
        ("context_parallel", options.context_parallel),
        ("pipeline_parallel", options.pipeline_parallel),
    )
    for name, ranks in asked:
        check_divides(f"megatron: {name}", ranks, each, f"the {each} rank(s) there are for it")
        each //= ranks
    check_divides(
        "megatron: expert_parallel",
        options.expert_parallel,
        stage := world_size // options.pipeline_parallel,
        f"the {stage} rank(s) of a pipeline stage",
    )
    return {
        PIPELINE: options.pipeline_parallel,
        DATA: each,
        CONTEXT: options.context_parallel,
        TENSOR: options.tensor_parallel,
    }
