"""Low-rank adapters (LoRA): layers of `peft` in a sharded model. A, `(rank, in)`, and B, `(out, rank)`, are trained.

`peft` wraps a linear layer `q_proj`. Its weight is then called `q_proj.base_layer.weight`, beside
`q_proj.lora_A.default.weight` and `q_proj.lora_B.default.weight`. Only this module knows these names, because weights
are sent merged, under the names of the Hugging Face checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from enginehouse.engines.weights import ParamMeta
from enginehouse.errors import ConfigError, ModelError, listed, nearest
from enginehouse_fsdp.gathering import own_part
from enginehouse_torch.modeling.export import share_weights
from enginehouse_torch.modeling.files import CheckpointError
from enginehouse_torch.modeling.holding import VALUE_HEAD, find_unreached
from enginehouse_torch.modeling.schedule import lr_factors

if TYPE_CHECKING:
    from peft import LoraConfig
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
    downs = _gather_columns([state[layer + DOWN] for layer in layers.values()])
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


def _gather_columns(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Gather matrices with the same number of rows in one collective, side by side. All of them must be split over the
    ranks in the same way."""
    if not tensors or not isinstance(first := tensors[0], DTensor):
        return tensors
    axis = next(axis for axis, placement in enumerate(first.placements) if placement.is_shard())
    group = first.device_mesh.get_group(axis)
    if group.size() == 1:
        return [own_part(tensor) for tensor in tensors]
    own = torch.cat([own_part(tensor) for tensor in tensors], dim=1)
    each = -(-first.shape[0] // group.size())
    padded = own.new_zeros(each, own.shape[1])
    padded[: own.shape[0]] = own
    rows = own.new_empty(group.size() * each, own.shape[1])
    dist.all_gather_into_tensor(rows, padded, group=group)
    return rows[: first.shape[0]].split([tensor.shape[1] for tensor in tensors], dim=1)


def add_adapters(model: PreTrainedModel, lora: LoraOptions, spec: ModelSpec) -> None:
    """Add adapters to a model on the meta device, before it is sharded; freeze all but the adapters and a value head.

    Frozen parameters need no float32 copy for updates, so they have the dtype that the model computes in.

    Raises:
        ConfigError: a target is not a linear layer of the model, or is smaller than the rank.
        ModelError: `peft` adapts other layers than `lora.targets` chooses.
    """
    from peft import inject_adapter_in_model

    targets = _find_targets(model, lora)
    inject_adapter_in_model(_peft_config(lora, targets), model, ADAPTER, low_cpu_mem_usage=True)
    adapted = {name.removesuffix(DOWN) for name, _ in model.named_parameters() if name.endswith(DOWN)}
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
    """Initialise adapters: B with zero, A uniformly within `1 / sqrt(in)` as `peft` does, seeded by `seed` and name.

    Each rank samples the whole of A and keeps its rows; nothing communicates.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(UP):
                parameter.zero_()
            elif name.endswith(DOWN):
                digest = hashlib.sha256(f"{seed} {name.removesuffix(DOWN)}".encode()).digest()
                generator = torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)
                bound = 1 / math.sqrt(parameter.shape[1])
                _keep_own(parameter, (2 * torch.rand(parameter.shape, generator=generator) - 1) * bound)


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
        if isinstance(module, torch.nn.Linear) and f"{name}.weight" not in unreached
    }
    linear.pop(VALUE_HEAD, None)
    output_name = next((name for name, module in linear.items() if module is output), None)
    tied = getattr(model.config.get_text_config(), "tie_word_embeddings", False)
    if output_name is not None and (lora.targets == "all-linear" or tied):
        del linear[output_name]
    chosen = set(linear) if lora.targets == "all-linear" else set()
    for target in [] if lora.targets == "all-linear" else lora.targets:
        matches = {name for name in linear if _matches(target, name)}
        if not matches and output_name is not None and _matches(target, output_name):
            raise ConfigError(f"fsdp: lora.targets: {target!r} cannot have adapters: it is tied to the embedding")
        if not matches:
            raise ConfigError(
                f"fsdp: lora.targets: {type(model).__name__} has no linear layer {target!r}. "
                + nearest(target, {name.rpartition(".")[2] for name in linear})
            )
        chosen |= matches
    if not chosen:
        raise ConfigError(
            f"fsdp: lora: nothing to adapt: lora.targets is empty, or {type(model).__name__} has no linear layer"
        )
    ordered = [name for name in linear if name in chosen]
    smallest = min(ordered, key=lambda name: min(linear[name].weight.shape))
    if lora.rank > (most := min(linear[smallest].weight.shape)):
        raise ConfigError(
            f"fsdp: lora.rank is {lora.rank}, but {smallest!r} has the shape {tuple(linear[smallest].weight.shape)}: "
            f"lower the rank to at most {most}, or leave {smallest.rpartition('.')[2]!r} out of lora.targets"
        )
    return ordered


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


def _matches(target: str, name: str) -> bool:
    """Return True if a target is a module's full name or the end of it."""
    return name == target or name.endswith(f".{target}")


def _peft_config(
    lora: LoraOptions, targets: Iterable[str], base: str | None = None, inference: bool = False
) -> LoraConfig:
    from peft import LoraConfig

    return LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,  # type: ignore[arg-type]
        target_modules=list(targets),
        base_model_name_or_path=base,
        inference_mode=inference,
    )


class AdapterWeights:
    """The `WeightSource` of a model's adapters: every A and B, whole on every rank, under the names of a `peft` file.

    Args:
        model: the model with adapters.
        dtype: dtype of the yielded matrices.
    """

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype):
        self._matrices = {name: p.detach() for name, p in model.named_parameters() if name.endswith((DOWN, UP))}
        self._dtype = dtype

    def metadata(self) -> list[ParamMeta]:
        """Describe all matrices."""
        dtype = str(self._dtype).removeprefix("torch.")
        return [ParamMeta(_name_in_file(name), dtype, tuple(tensor.shape)) for name, tensor in self._matrices.items()]

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each whole matrix on every rank; collective."""
        by_rows: dict[int, list[str]] = {}  # matrices that one collective gathers
        for name, tensor in self._matrices.items():
            by_rows.setdefault(tensor.shape[0], []).append(name)
        whole: dict[str, torch.Tensor] = {}
        for names in by_rows.values():
            whole |= zip(names, _gather_columns([self._matrices[name] for name in names]), strict=True)
        for name in self._matrices:
            yield _name_in_file(name), whole[name].to(self._dtype)

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the same as `iter_full`, because adapters are small."""
        return self.iter_full()


def _name_in_file(name: str) -> str:
    return f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}"


def write_adapter(
    directory: Path, model: PreTrainedModel, lora: LoraOptions, base: str, weights: Mapping[str, torch.Tensor]
) -> None:
    """Write `adapter_model.safetensors` and `adapter_config.json` of the `weights` of `AdapterWeights`."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.cpu().contiguous() for name, tensor in weights.items()}, directory / "adapter_model.safetensors"
    )
    adapted = [name.removesuffix(DOWN) for name, _ in model.named_parameters() if name.endswith(DOWN)]
    endings = {name.rpartition(".")[2] for name in adapted}
    modules = [name for name, _ in model.named_modules()]
    exact = {name for name in modules if name.rpartition(".")[2] in endings} == set(adapted)
    _peft_config(lora, sorted(endings) if exact else adapted, base, inference=True).save_pretrained(str(directory))
    share_weights(directory, directory / "adapter_config.json")


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
    if saved and not expected:
        raise CheckpointError(f"checkpoint {path!r} holds adapters: set the option lora as in the run that saved it")
    if expected and not saved:
        raise CheckpointError(f"checkpoint {path!r} holds a whole model and no adapters: leave the option lora unset")
    if saved != expected:
        raise CheckpointError(f"checkpoint {path!r} holds adapters of a base model with other names or shapes")
    if (saved := _find_sign(saved_names, ALPHA)) != (expected := _find_sign(model_names, ALPHA)):
        raise CheckpointError(f"checkpoint {path!r} was saved with lora.alpha {saved}, but this run has {expected}")


def _find_sign(names: Iterable[str], prefix: str) -> str:
    return next((name.removeprefix(prefix) for name in names if name.startswith(prefix)), "")
