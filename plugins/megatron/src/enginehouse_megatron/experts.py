"""Experts of torch's own operations, with the parameter names of those made of transformer-engine modules.

Each rank has whole experts (`expert_parallel`), one parameter an expert and matrix. Which tokens they get, and what
becomes of the results, is megatron-core's: its router, and its dispatcher by all-to-all.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from enginehouse_megatron import kernels  # noqa: F401  before all else of megatron-core

# isort: split
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint


class GroupedLinear(torch.nn.Module):
    """A linear layer for each of this rank's experts, each over the tokens it was given.

    No collective is in it: the experts' matrices are not split (`expert_tensor_parallel_size` is 1).
    """

    axis: ClassVar[int]
    """By which dimension more ranks would split the matrices: only what a checkpoint notes of them."""

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
        """Compute each expert's tokens.

        Args:
            tokens: `(tokens, input_size)`, in the order of the experts.
            counts: how many each has.

        Returns:
            `(tokens, output_size)`, and no bias.
        """
        weights = (getattr(self, f"weight{expert}") for expert in range(self._count))
        found = [F.linear(own, weight) for own, weight in zip(tokens.split(counts), weights, strict=True)]
        return torch.cat(found), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """As `TEGroupedLinear` (transformer_engine.py:1738): one tensor of all experts, of which each is a slice."""
        experts, first = self._groups.ep.size() * self._count, self._groups.ep.rank() * self._count
        found = {}
        for expert in range(self._count):
            sharded = make_sharded_tensors_for_checkpoint(
                {"weight": getattr(self, f"weight{expert}")},
                prefix,
                {"weight": self.axis},
                (*sharded_offsets, (len(sharded_offsets), first + expert, experts)),
                tp_group=self._groups.expt_tp,
                dp_cp_group=self._groups.expt_dp,  # whose ranks have the same experts
            )
            found[f"{prefix}weight{expert}"] = sharded[f"{prefix}weight"]
        return found


class ColumnGroupedLinear(GroupedLinear):
    """`TEColumnParallelGroupedLinear`."""

    axis = 0


class RowGroupedLinear(GroupedLinear):
    """`TERowParallelGroupedLinear`."""

    axis = 1


def experts_layer() -> ModuleSpec:
    """The feed-forward part of a layer with experts."""
    matrices = MLPSubmodules(linear_fc1=ColumnGroupedLinear, linear_fc2=RowGroupedLinear)
    return ModuleSpec(MoELayer, submodules=MoESubmodules(experts=ModuleSpec(TEGroupedMLP, submodules=matrices)))


def release(model: torch.nn.Module) -> None:
    """Let go of the last batch, whose routing the dispatchers keep (token_dispatcher.py:610), and with it its graph.

    The graph holds the hooks of the gradients, and they the model: a cycle through C++, which Python does not collect.
    """
    for layer in model.modules():
        if isinstance(layer, MoELayer):
            layer.token_dispatcher = None
