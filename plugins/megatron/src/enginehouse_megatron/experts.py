"""Experts made of torch's own operations, with the parameter names of transformer-engine's experts.

Each rank has whole experts (`expert_parallel`), with a parameter for each expert and matrix. megatron-core's router
chooses the tokens of each expert, and its all-to-all dispatcher sends them and returns the results.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint


class GroupedLinear(torch.nn.Module):
    """A linear layer for each of this rank's experts, each over its own tokens.

    It needs no collective, because the experts' matrices are not split (`expert_tensor_parallel_size` is 1).
    """

    axis: ClassVar[int]
    """Dimension that tensor parallelism would split. The matrices are never split here; only checkpoints need it."""

    def __init__(
        self, num_gemms: int, input_size: int, output_size: int, *, config: TransformerConfig, **arguments: Any
    ):
        super().__init__()
        self._count = num_gemms
        self._groups = arguments["pg_collection"]
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        for expert in range(num_gemms):
            weight = torch.empty(output_size, input_size, dtype=config.params_dtype, device=device)
            self.register_parameter(f"weight{expert}", torch.nn.Parameter(weight))

    def forward(self, tokens: torch.Tensor, counts: list[int]) -> tuple[torch.Tensor, None]:
        """Apply each expert's layer to its tokens.

        Args:
            tokens: `(tokens, input_size)`, grouped by expert.
            counts: Number of tokens of each expert.

        Returns:
            `(tokens, output_size)`, and no bias.
        """
        weights = (getattr(self, f"weight{expert}") for expert in range(self._count))
        return torch.cat(
            [F.linear(own, weight) for own, weight in zip(tokens.split(counts), weights, strict=True)]
        ), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return each expert as a slice of one tensor, like `TEGroupedLinear` (transformer_engine.py:1738)."""
        experts, first = self._groups.ep.size() * self._count, self._groups.ep.rank() * self._count
        state = {}
        for expert in range(self._count):
            sharded = make_sharded_tensors_for_checkpoint(
                {"weight": getattr(self, f"weight{expert}")},
                prefix,
                {"weight": self.axis},
                (*sharded_offsets, (len(sharded_offsets), first + expert, experts)),
                tp_group=self._groups.expt_tp,
                dp_cp_group=self._groups.expt_dp,  # whose ranks have the same experts
            )
            state[f"{prefix}weight{expert}"] = sharded[f"{prefix}weight"]
        return state


class ColumnGroupedLinear(GroupedLinear):
    """Stands in for `TEColumnParallelGroupedLinear`."""

    axis = 0


class RowGroupedLinear(GroupedLinear):
    """Stands in for `TERowParallelGroupedLinear`."""

    axis = 1


def experts_layer() -> ModuleSpec:
    """Return the feed-forward part of a layer with experts."""
    matrices = MLPSubmodules(linear_fc1=ColumnGroupedLinear, linear_fc2=RowGroupedLinear)
    return ModuleSpec(MoELayer, submodules=MoESubmodules(experts=ModuleSpec(TEGroupedMLP, submodules=matrices)))


def release(model: torch.nn.Module) -> None:
    """Release the last batch's routing, which the dispatchers keep (token_dispatcher.py:610), with its graph.

    The graph holds the gradients' hooks, and these hold the model: a cycle through C++ that Python does not collect.
    """
    for layer in model.modules():
        if isinstance(layer, MoELayer):
            layer.token_dispatcher = None
