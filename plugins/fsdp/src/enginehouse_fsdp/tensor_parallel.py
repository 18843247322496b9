"""Splits a model's matrices over ranks by the plan of its class (`model.tp_plan`).

The plan names a style for each layer, which torch's parallel styles implement. Other parameters (norms, a value head)
are whole on every rank of the axis and get the same gradient there, because the tensors between blocks are whole.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from enginehouse.errors import ConfigError
from enginehouse_fsdp.adapters import split_like_weights
from enginehouse_torch.modeling.holding import freeze

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel


def _norm_own_heads() -> ParallelStyle:
    # A norm over the last dimension of this rank's heads. Its weight's gradient is summed over the ranks, whichever of
    # the other dimensions is declared as split.
    return SequenceParallel(sequence_dim=0, use_local_output=True)


def _gather_output() -> ParallelStyle:
    return ColwiseParallel(output_layouts=Replicate())


def _split_input() -> ParallelStyle:
    return RowwiseParallel(input_layouts=Replicate())


STYLES: dict[str, Callable[[], ParallelStyle] | None] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": _gather_output,
    "colwise_rep": _gather_output,
    "rowwise_split_input": _split_input,
    "rowwise_rep": _split_input,
    "embedding_rowwise": _split_input,
    "embedding_colwise": _gather_output,
    "replicated_with_grad_allreduce": _norm_own_heads,
    "replicate": None,
}
"""torch's style for each style of a transformers plan; None: nothing to do."""

HEADS = {
    "q_proj": "num_attention_heads",
    "k_proj": "num_key_value_heads",
    "v_proj": "num_key_value_heads",
    "query_key_value": "num_attention_heads",
}
"""Layers whose outputs are heads, and for each the config key of the number of heads."""


def split_matrices(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Turn the parameters that the model's plan splits into DTensors on `mesh` (one axis), before they have memory.

    Tied parameters are tied again afterwards.

    Raises:
        ConfigError: the model has no plan or a plan with an unknown style, or a size is not divisible by the number of
            ranks.
    """
    plan = _plan_layers(model, mesh.size())
    _check_sizes(model, plan, mesh.size())
    plan = split_like_weights(model, plan)
    styles = {name: create() for name, style in plan.items() if (create := STYLES[style]) is not None}
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    parallelize_module(model, mesh, styles, src_data_rank=None)
    freeze(model, frozen)  # again, because torch makes some parameters anew, such as a norm's
    model.tie_weights()
    # FSDP warns of in-place operations on gathered logits, which are views; there are no such operations here.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")


def _plan_layers(model: PreTrainedModel, size: int) -> dict[str, str]:
    """Return the style of each layer that has one, by the layer's name."""
    asked = f"fsdp: tensor_parallel={size}"
    rules = dict(getattr(model, "tp_plan", None) or {})
    if not any(style not in ("replicate", "embedding_rowwise", "embedding_colwise") for style in rules.values()):
        raise ConfigError(
            f"{asked}: {type(model).__name__} has no tensor-parallel plan (base_model_tp_plan of its config class); "
            "use tensor_parallel=1, which shards it over the same ranks"
        )
    planned = {name: rules[rule] for name, _ in model.named_modules() if (rule := _rule(name)) in rules}
    parameters = {_rule(name) for name, _ in model.named_parameters()}
    styles = {*planned.values(), *(style for rule, style in rules.items() if rule in parameters)}
    if unknown := sorted(styles - set(STYLES)):
        raise ConfigError(
            f"{asked}: the plan of {type(model).__name__} has the style {unknown[0]!r}, which fsdp does not support; "
            "use tensor_parallel=1"
        )
    _settle_vocabulary(model, planned)
    return planned


def _rule(name: str) -> str:
    """Return a layer's name as plans spell it: `model.layers.*.mlp`."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _settle_vocabulary(model: PreTrainedModel, planned: dict[str, str]) -> None:
    """Split an embedding and an output layer that share a weight in the same way, or split neither."""
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    if outputs is None:
        return
    names = {module: name for name, module in model.named_modules()}
    if inputs.weight is outputs.weight:
        pair = {names[inputs]: "embedding_rowwise", names[outputs]: "colwise_gather_output"}
        if any(name in planned for name in pair):
            planned.update(pair)


def _check_sizes(model: PreTrainedModel, plan: dict[str, str], size: int) -> None:
    """Raise ConfigError if a split would be uneven."""
    counts = dict(_list_sizes(model, plan))
    if uneven := next((what for what, count in counts.items() if count % size), None):
        largest = math.gcd(*counts.values())
        possible = [n for n in range(1, largest + 1) if largest % n == 0]
        nearest = min(possible, key=lambda n: (abs(n - size), -n))
        raise ConfigError(
            f"fsdp: tensor_parallel={size} does not divide {uneven} of {type(model).__name__} ({counts[uneven]}); "
            f"nearest divisor: tensor_parallel={nearest}"
        )


def _list_sizes(model: PreTrainedModel, plan: dict[str, str]) -> Iterator[tuple[str, int]]:
    """Yield the description and the value of each size that must be divisible by the number of ranks."""
    config = model.config.get_text_config()
    for name, style in plan.items():
        layer = name.rpartition(".")[2]
        module = model.get_submodule(name)
        if style == "colwise" and layer in HEADS:
            heads = getattr(config, HEADS[layer], None) or config.num_attention_heads
            yield (HEADS[layer], heads)
        is_linear = hasattr(module, "in_features")  # with adapters or without
        if is_linear and style == "colwise":
            yield (f"the outputs of {layer}", module.out_features)
        if is_linear and style.startswith("rowwise"):
            yield (f"the inputs of {layer}", module.in_features)
