"""megatron-core's process groups. It keeps them in globals, so all roles in a process share a layout."""

from __future__ import annotations

from collections.abc import Mapping

from enginehouse_megatron import kernels  # noqa: F401  before all else of megatron-core

# isort: split
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel.random import initialize_rng_tracker

from enginehouse.errors import ConfigError
from enginehouse_megatron.axes import CONTEXT, PIPELINE, TENSOR

_users: list[dict[str, int]] = []
"""Layout of each engine in this process."""


def join(sizes: Mapping[str, int], virtual_stages: int = 1, expert_parallel: int = 1) -> None:
    """Make the process groups of a layout (`axis_sizes`), or use those that another role made here; collective.

    Raises:
        ConfigError: A role that shares these processes has another layout.
    """
    further = {"virtual": virtual_stages, "ep": expert_parallel}
    layout = dict(sizes) | {name: size for name, size in further.items() if size > 1}
    if _users and _users[0] != layout:
        raise ConfigError(
            "megatron: roles that share processes must have the same layout, but "
            f"one has {_format(_users[0])} and another {_format(layout)}: "
            "give both the same options, or separate processes"
        )
    if not _users:
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout[TENSOR],
            pipeline_model_parallel_size=layout[PIPELINE],
            virtual_pipeline_model_parallel_size=virtual_stages if virtual_stages > 1 else None,
            context_parallel_size=layout[CONTEXT],
            expert_model_parallel_size=expert_parallel,
            expert_tensor_parallel_size=1,
        )
        # Without dropout or sampled weights, all ranks may have the same random states.
        initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    _users.append(layout)


def leave() -> None:
    """End the groups once no role uses them, but not the process group itself."""
    if _users:
        _users.pop()
        if not _users:
            parallel_state.destroy_model_parallel()
            # megatron-core 0.16.1 keeps these groups, and so gloo's threads.
            parallel_state._INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP = None
            parallel_state._INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO = None
            RotaryEmbedding.forward.cache_clear()  # rotary_pos_embedding.py:177, which keeps the module and its group


def _format(sizes: Mapping[str, int]) -> str:
    return " x ".join(f"{axis}{size}" for axis, size in sizes.items())
