"""Low-rank adapters (LoRA): layers of `peft` in a sharded model. A, `(rank, in)`, and B, `(out, rank)`, are trained.

`peft` wraps a linear layer `q_proj`. Its weight is then called `q_proj.base_layer.weight`, beside
`q_proj.lora_A.default.weight` and `q_proj.lora_B.default.weight`. Only this module knows these names, because weights
are sent merged, under the names of the Hugging Face checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from enginehouse.engines.weights import ParamMeta
from enginehouse.errors import ModelError, listed
from enginehouse_fsdp.axes import SHARD
from enginehouse_fsdp.gathering import Gathering, own_part
from enginehouse_torch.modeling.adapters import check_alike, choose_layers, draw_down, name_in_file, peft_config
from enginehouse_torch.modeling.files import CheckpointError
from enginehouse_torch.modeling.holding import VALUE_HEAD, find_unreached
from enginehouse_torch.modeling.schedule import lr_factors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from enginehouse.engines.model import ModelSpec
    from enginehouse.engines.options import LoraOptions
    from enginehouse_fsdp.options import FSDPOptions

ADAPTER = "default"
"""`peft`'s name of an adapter without a name."""
DOWN, UP, BASE = f".lora_A.{ADAPTER}.weight", f".lora_B.{ADAPTER}.weight", ".base_layer."
OF_BASE, ALPHA = "adapters.base.", "adapters.alpha."
"""Prefixes of the entries by which a checkpoint identifies the base model and the scale of its adapters."""


def adapter_lr_factors(names: Iterable[str], options: FSDPOptions) -> dict[str, float]:
    """Return `lr_factors` by name; an adapter has the factor of the weight to which it is added."""
    base_names = {name: name.replace(DOWN, ".weight").replace(UP, ".weight") for name in names}
    factors = lr_factors(base_names.values(), options)
    return {name: factors[base_name] for name, base_name in base_names.items()}


def base_state(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a model's state without adapters, under the base model's names."""
    return {name.replace(BASE, "."): tensor for name, tensor in state.items() if not name.endswith((DOWN, UP))}


def merge_adapters(state: Mapping[str, torch.Tensor], names: Sequence[str], alpha: float) -> dict[str, torch.Tensor]:
    """Return the weights `names` with their adapters added, sharded as before. Collective if a weight has an adapter.

    Args:
        state: the state of the model, adapters included.
        names: names in `base_state`.
        alpha: the product of B and A is scaled by `alpha / rank`.

    Returns:
        The weights by name: in float32 if the weight has an adapter, else the tensor of `state` itself.
    """
    base = base_state(state)
    layers = {name: name.removesuffix(".weight") for name in names if name.removesuffix(".weight") + UP in state}
    downs = _gather_rows([state[layer + DOWN] for layer in layers.values()])
    weights = {name: base[name] for name in names}
    for (name, layer), down in zip(layers.items(), downs, strict=True):
        weight, up = base[name], state[layer + UP]
        local = torch.addmm(own_part(weight).float(), own_part(up), down, alpha=alpha / down.shape[0])
        weights[name] = local
        if isinstance(weight, DTensor):
            mesh, shape, stride = weight.device_mesh, weight.shape, weight.stride()
            weights[name] = DTensor.from_local(
                local, mesh, weight.placements, run_check=False, shape=shape, stride=stride
            )
    return weights


def _gather_rows(downs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Gather all rows of matrices A in one collective, side by side. Of the columns, a rank keeps those that it holds:
    they belong to the columns of the weight that it holds."""
    if not downs or not isinstance(first := downs[0], DTensor):
        return downs
    group = first.device_mesh.get_group(SHARD)
    parts = [own_part(down) for down in downs]
    if group.size() == 1:
        return parts
    own = torch.cat(parts, dim=1)
    each = -(-first.shape[0] // group.size())
    padded = own.new_zeros(each, own.shape[1])
    padded[: own.shape[0]] = own
    rows = own.new_empty(group.size() * each, own.shape[1])
    dist.all_gather_into_tensor(rows, padded, group=group)
    return rows[: first.shape[0]].split([part.shape[1] for part in parts], dim=1)


def add_adapters(model: PreTrainedModel, lora: LoraOptions, spec: ModelSpec) -> None:
    """Add adapters to a model on the meta device, before it is sharded; freeze all but the adapters and a value head.

    Frozen parameters need no float32 copy for updates, so they have the dtype that the model computes in.

    Raises:
        ConfigError: a target is not a linear layer of the model, or is smaller than the rank.
        ModelError: `peft` adapts other layers than `lora.targets` chooses.
    """
    from peft import inject_adapter_in_model

    targets = _find_targets(model, lora)
    inject_adapter_in_model(peft_config(lora, targets), model, ADAPTER, low_cpu_mem_usage=True)
    adapted = set(adapted_layers(model))
    if adapted != set(targets):
        disputed = min(adapted ^ set(targets))
        raise ModelError(
            f"fsdp: peft adapts other layers of {type(model).__name__} than lora.targets chooses, such as {disputed!r}"
        )
    if spec.head == "value":
        model.get_submodule(VALUE_HEAD).requires_grad_(True)
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(getattr(torch, spec.dtype))


def split_like_weights(model: PreTrainedModel, styles: Mapping[str, str]) -> dict[str, str]:
    """Return the tensor-parallel style of each layer, also of an adapted layer's weight and adapters.

    If a weight is split by outputs, so is its B, and every rank has the whole A. If it is split by inputs, so is its A,
    and every rank has the whole B.

    Args:
        model: the model, with or without adapters.
        styles: the style of each layer of the model without adapters.
    """
    adapted = set(adapted_layers(model))
    spread = {}
    for name, style in styles.items():
        if name in adapted:
            spread[f"{name}.base_layer"] = style
            spread[f"{name}.{'lora_A' if style.startswith('rowwise') else 'lora_B'}.{ADAPTER}"] = style
        else:
            spread[name] = style
    return spread


@contextmanager
def disable_adapters(model: PreTrainedModel) -> Iterator[None]:
    """Run the block without the effect of adapters. They are still computed, but multiplied by zero, so that all ranks
    gather parameters as usual."""
    from peft.tuners.lora import LoraLayer

    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    try:
        for layer in layers:
            layer.set_scale(ADAPTER, 0.0)
        yield
    finally:
        for layer in layers:
            layer.set_scale(ADAPTER, 1.0)


def initialize(model: PreTrainedModel, seed: int) -> None:
    """Initialise adapters: B with zero, A as `draw_down` says. Nothing communicates."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(UP):
                parameter.zero_()
            elif name.endswith(DOWN):
                _keep_own(parameter, draw_down(name.removesuffix(DOWN), parameter.shape, seed))


def _keep_own(parameter: torch.Tensor, whole: torch.Tensor) -> None:
    if not isinstance(parameter, DTensor):
        parameter.copy_(whole)
        return
    mesh = parameter.device_mesh
    cut = distribute_tensor(whole.to(mesh.device_type), mesh, parameter.placements, src_data_rank=None)
    parameter.to_local().copy_(cut.to_local())


def _find_targets(model: PreTrainedModel, lora: LoraOptions) -> list[str]:
    """Return the full names of the linear layers to adapt, in the model's order."""
    output = model.get_output_embeddings()
    unreached = find_unreached(model)
    linear = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and f"{name}.weight" not in unreached and name != VALUE_HEAD
    }
    return choose_layers(
        lora,
        {name: module.weight.shape for name, module in linear.items()},
        engine="fsdp",
        model=type(model).__name__,
        output=next((name for name, module in linear.items() if module is output), ""),
        tied=getattr(model.config.get_text_config(), "tie_word_embeddings", False),
    )


def describe_left_out(model: PreTrainedModel, lora: LoraOptions) -> str:
    """Describe the matrices that `all-linear` does not adapt; empty: none.

    Raises:
        ConfigError: the requested layers do not exist.
    """
    adapted = {f"{name}.weight" for name in _find_targets(model, lora)}
    if lora.targets != "all-linear":
        return ""
    embeddings = [
        module for module in (model.get_input_embeddings(), model.get_output_embeddings()) if module is not None
    ]
    embedding_ids = {id(parameter) for module in embeddings for parameter in module.parameters()}
    matrices = {name: p for name, p in model.named_parameters() if p.dim() > 1 and id(p) not in embedding_ids}
    groups = {re.sub(r"\.\d+\.", ".*.", name): p for name, p in matrices.items() if name not in adapted}
    if not groups:
        return ""
    part = sum(p.numel() for name, p in matrices.items() if name not in adapted) / sum(
        p.numel() for p in matrices.values()
    )
    return (
        f"lora.targets=all-linear does not adapt {listed(sorted(groups))}, {part:.0%} of the model's matrices: "
        "they are not linear layers (the experts of a mixture are one tensor)"
    )


class AdapterWeights:
    """The `WeightSource` of a model's adapters: every A and B, whole on every rank, under the names of a `peft` file.

    Args:
        model: the model with adapters.
        dtype: dtype of the yielded matrices.
    """

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype):
        adapters = ((name, matrix) for name, matrix in model.named_parameters() if name.endswith((DOWN, UP)))
        self._matrices = {name: matrix.detach() for name, matrix in adapters}
        self._dtype = dtype

    def metadata(self) -> list[ParamMeta]:
        """Describe all matrices."""
        dtype = str(self._dtype).removeprefix("torch.")
        return [ParamMeta(_name_in_file(name), dtype, tuple(tensor.shape)) for name, tensor in self._matrices.items()]

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each whole matrix on every rank; collective."""
        tensors = list(self._matrices.values())
        gathering = Gathering.start(
            list(self._matrices), tensors, [own_part(tensor) for tensor in tensors], self._dtype
        )
        yield from ((_name_in_file(name), whole.to(self._dtype)) for name, whole in gathering.wait())

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the same as `iter_full`, because adapters are small."""
        return self.iter_full()


def _name_in_file(name: str) -> str:
    """Return the name in a file of `peft` of a parameter of an adapter."""
    return name_in_file(name.removesuffix(DOWN).removesuffix(UP), "A" if name.endswith(DOWN) else "B")


def adapted_layers(model: PreTrainedModel) -> list[str]:
    """Return the full names of the layers that have adapters."""
    return [name.removesuffix(DOWN) for name, _ in model.named_parameters() if name.endswith(DOWN)]


def select_trained(
    state: Mapping[str, torch.Tensor], model: PreTrainedModel, lora: LoraOptions
) -> dict[str, torch.Tensor]:
    """Return the state that a checkpoint of a model with adapters holds: the adapters, and a value head.

    Two more entries are scalars whose names identify the base model: `adapters.base.D`, D a digest of the names and
    shapes of the model without adapters, and `adapters.alpha.A`, A the option `lora.alpha`.
    """
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    shapes = json.dumps(sorted((name, list(tensor.shape)) for name, tensor in base_state(state).items()))
    digest = hashlib.sha256(shapes.encode()).hexdigest()[:16]
    signs = (f"{OF_BASE}{digest}", f"{ALPHA}{lora.alpha:g}")
    return {name: tensor for name, tensor in state.items() if name in trained} | {
        sign: torch.zeros(()) for sign in signs
    }


def check_belongs(path: str, saved_names: Iterable[str], model_names: Iterable[str]) -> None:
    """Check that a checkpoint's adapters belong to the model. A checkpoint that holds no part of the model is accepted.

    Raises:
        CheckpointError: only one of checkpoint and model has adapters, or the adapters belong to a base model with
            other names or shapes, or have another `lora.alpha`.
    """
    saved_names, model_names = list(saved_names), list(model_names)
    if not saved_names:
        return
    saved, expected = _find_sign(saved_names, OF_BASE), _find_sign(model_names, OF_BASE)
    check_alike(path, saved=bool(saved), expected=bool(expected))
    if saved != expected:
        raise CheckpointError(f"checkpoint {path!r} holds adapters of a base model with other names or shapes")
    if (saved := _find_sign(saved_names, ALPHA)) != (expected := _find_sign(model_names, ALPHA)):
        raise CheckpointError(f"checkpoint {path!r} was saved with lora.alpha {saved}, but this run has {expected}")


def _find_sign(names: Iterable[str], prefix: str) -> str:
    return next((name.removeprefix(prefix) for name in names if name.startswith(prefix)), "")
