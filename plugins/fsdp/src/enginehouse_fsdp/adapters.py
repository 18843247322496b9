"""Low-rank adapters (LoRA): layers of `peft` in a sharded model, which trains their A `(rank, in)` and B `(out, rank)`.

`peft` wraps a linear layer `q_proj`: its weight is called `q_proj.base_layer.weight` from then on, beside
`q_proj.lora_A.default.weight` and `q_proj.lora_B.default.weight`. Only this module knows these names: weights leave
merged, under the names of the Hugging Face checkpoint.
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

from enginehouse.errors import ConfigError, ModelError, listed, nearest
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
"""What `peft` calls an adapter that is given no name."""
DOWN, UP, BASE = f".lora_A.{ADAPTER}.weight", f".lora_B.{ADAPTER}.weight", ".base_layer."
OF_BASE, ALPHA = "adapters.base.", "adapters.alpha."
"""How the entries of a checkpoint begin that say what its adapters belong to."""


def adapter_lr_factors(names: Iterable[str], options: FSDPOptions) -> dict[str, float]:
    """As `lr_factors`; an adapter is called as the weight that it is added to."""
    called = {name: name.replace(DOWN, ".weight").replace(UP, ".weight") for name in names}
    factors = lr_factors(called.values(), options)
    return {name: factors[of] for name, of in called.items()}


def base_state(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A model's state as that of the model without adapters; one that has none is given back as it is."""
    return {name.replace(BASE, "."): tensor for name, tensor in state.items() if not name.endswith((DOWN, UP))}


def merge_adapters(state: Mapping[str, torch.Tensor], names: Sequence[str], alpha: float) -> dict[str, torch.Tensor]:
    """Some weights, each with its adapter added; sharded as they are. Collective, where one of them has an adapter.

    Args:
        state: the model's, adapters included.
        names: names that `base_state` has.
        alpha: the adapters' product is scaled by `alpha / rank`.

    Returns:
        By name: float32 where there is an adapter, else the tensor of the state itself.
    """
    base = base_state(state)
    layers = {name: name.removesuffix(".weight") for name in names if name.removesuffix(".weight") + UP in state}
    downs = _gather_columns([state[layer + DOWN] for layer in layers.values()])
    found = {name: base[name] for name in names}
    for (name, layer), down in zip(layers.items(), downs, strict=True):
        weight, up = base[name], state[layer + UP]
        own = torch.addmm(_own(weight).float(), _own(up), down, alpha=alpha / down.shape[0])
        found[name] = own
        if isinstance(weight, DTensor):
            found[name] = DTensor.from_local(
                own,
                weight.device_mesh,
                weight.placements,
                run_check=False,
                shape=weight.shape,
                stride=weight.stride(),
            )
    return found


def _gather_columns(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Gather matrices of as many rows each, all in one go: they are cut alike, so they fit side by side."""
    if not tensors or not isinstance(first := tensors[0], DTensor):
        return tensors
    axis = next(axis for axis, placement in enumerate(first.placements) if placement.is_shard())
    group = first.device_mesh.get_group(axis)
    own = torch.cat([_own(tensor) for tensor in tensors], dim=1)
    most = -(-first.shape[0] // group.size())
    padded = own.new_zeros(most, own.shape[1])
    padded[: own.shape[0]] = own
    rows = own.new_empty(group.size() * most, own.shape[1])
    dist.all_gather_into_tensor(rows, padded, group=group)
    return rows[: first.shape[0]].split([tensor.shape[1] for tensor in tensors], dim=1)


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def add_adapters(model: PreTrainedModel, lora: LoraOptions, spec: ModelSpec) -> None:
    """Add adapters to a model on the meta device, before it is sharded; freeze all but them and a value head.

    What is frozen needs no float32 copy to be updated in: it is kept in the dtype the model computes in.

    Raises:
        ConfigError: a target is no linear layer of the model, or smaller than the rank.
        ModelError: `peft` adapts other layers of it.
    """
    from peft import inject_adapter_in_model

    targets = _find_targets(model, lora)
    inject_adapter_in_model(_peft_config(lora, targets), model, ADAPTER, low_cpu_mem_usage=True)
    adapted = {name.removesuffix(DOWN) for name, _ in model.named_parameters() if name.endswith(DOWN)}
    if adapted != set(targets):
        other = min(adapted ^ set(targets))
        raise ModelError(f"fsdp: peft cannot adapt {type(model).__name__} as asked: it disagrees about {other!r}")
    if spec.head == "value":
        model.get_submodule(VALUE_HEAD).requires_grad_(True)
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(getattr(torch, spec.dtype))


@contextmanager
def disable_adapters(model: PreTrainedModel) -> Iterator[None]:
    """The model without what its adapters add. They are still run, times zero, so that ranks gather as ever."""
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
    """Give adapters their first values: zero for B, and for A those that `peft` draws from, but by `seed` and name.

    A is uniform within `1 / sqrt(in)`. Each rank draws the whole of it and keeps its rows; nothing communicates.
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
    """Full names of the linear layers to adapt, in the model's order."""
    output = model.get_output_embeddings()
    beside = find_unreached(model)
    linear = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and f"{name}.weight" not in beside
    }
    linear.pop(VALUE_HEAD, None)
    output_name = next((name for name, module in linear.items() if module is output), None)
    tied = getattr(model.config.get_text_config(), "tie_word_embeddings", False)
    if output_name is not None and (lora.targets == "all-linear" or tied):
        del linear[output_name]
    chosen = set(linear) if lora.targets == "all-linear" else set()
    for target in [] if lora.targets == "all-linear" else lora.targets:
        found = {name for name in linear if _matches(target, name)}
        if not found and output_name is not None and _matches(target, output_name):
            raise ConfigError(f"fsdp: lora.targets: {target!r} cannot have adapters: it is one with the embedding")
        if not found:
            raise ConfigError(
                f"fsdp: lora.targets: {type(model).__name__} has no linear layer {target!r}; "
                + nearest(target, {name.rpartition(".")[2] for name in linear})
            )
        chosen |= found
    if not chosen:
        raise ConfigError(f"fsdp: lora: {type(model).__name__} has no linear layer to adapt, or none was named")
    ordered = [name for name in linear if name in chosen]
    smallest = min(ordered, key=lambda name: min(linear[name].weight.shape))
    if lora.rank > (most := min(linear[smallest].weight.shape)):
        raise ConfigError(
            f"fsdp: lora.rank is {lora.rank}, but {smallest!r} has the shape {tuple(linear[smallest].weight.shape)}: "
            f"lower the rank to at most {most}, or leave {smallest.rpartition('.')[2]!r} out of lora.targets"
        )
    return ordered


def describe_left_out(model: PreTrainedModel, lora: LoraOptions) -> str:
    """Say which matrices stay as they are though all layers were to be adapted; empty: none.

    Raises:
        ConfigError: there are no layers as asked for.
    """
    adapted = {f"{name}.weight" for name in _find_targets(model, lora)}
    if lora.targets != "all-linear":
        return ""
    others = [module for module in (model.get_input_embeddings(), model.get_output_embeddings()) if module is not None]
    beside = {id(parameter) for module in others for parameter in module.parameters()}
    matrices = {name: p for name, p in model.named_parameters() if p.dim() > 1 and id(p) not in beside}
    left = {re.sub(r"\.\d+\.", ".*.", name): p for name, p in matrices.items() if name not in adapted}
    if not left:
        return ""
    part = sum(p.numel() for name, p in matrices.items() if name not in adapted) / sum(
        p.numel() for p in matrices.values()
    )
    return (
        f"lora.targets=all-linear leaves {listed(sorted(left))} as they are, {part:.0%} of the model's matrices: "
        "they are no linear layers (the experts of a mixture are one tensor)"
    )


def _matches(target: str, name: str) -> bool:
    """Whether a target names a module: by its full name, or by how that ends."""
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


# What leaves


def gather_adapters(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every A and B of a model's state, whole, under the names they have in a file of `peft`; collective."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        if name.endswith((DOWN, UP)):
            (whole,) = _gather_columns([tensor])
            found[f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}"] = whole
    return found


def write_adapter(
    directory: Path, model: PreTrainedModel, lora: LoraOptions, base: str, weights: Mapping[str, torch.Tensor]
) -> None:
    """Write `adapter_model.safetensors` and `adapter_config.json`.

    Args:
        directory: made if it is missing.
        model: the adapted model.
        lora: its options.
        base: path of the model that was adapted, for the config.
        weights: what `whole_adapters` gave.
    """
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


# Checkpoints


def select_trained(
    state: Mapping[str, torch.Tensor], model: PreTrainedModel, lora: LoraOptions
) -> dict[str, torch.Tensor]:
    """What a checkpoint holds of a model with adapters: these and a value head, and nothing that is frozen.

    Two further entries are scalars without meaning whose names say what the adapters belong to: `adapters.base.D`, D a
    digest of the names and shapes of the model without adapters, and `adapters.alpha.A`.
    """
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    shapes = json.dumps(sorted((name, list(tensor.shape)) for name, tensor in base_state(state).items()))
    digest = hashlib.sha256(shapes.encode()).hexdigest()[:16]
    signs = (f"{OF_BASE}{digest}", f"{ALPHA}{lora.alpha:g}")
    return {name: tensor for name, tensor in state.items() if name in trained} | {
        sign: torch.zeros(()) for sign in signs
    }


def check_belongs(path: str, there: Iterable[str], here: Iterable[str]) -> None:
    """Check that a checkpoint's adapters belong where they are to be loaded.

    Args:
        path: the checkpoint, for the message.
        there: names of its entries of the model; none: it was saved without, as is said elsewhere.
        here: names of the entries that are to be loaded.

    Raises:
        CheckpointError: it holds adapters and the model has none, or the other way round; or they are of a base model
            with other names or shapes, or scaled otherwise.
    """
    there, here = list(there), list(here)
    if not there:
        return
    theirs, ours = _find_sign(there, OF_BASE), _find_sign(here, OF_BASE)
    if theirs and not ours:
        raise CheckpointError(f"checkpoint {path!r} holds adapters: set the option lora as the run that saved it did")
    if ours and not theirs:
        raise CheckpointError(f"checkpoint {path!r} holds a whole model and no adapters: leave the option lora unset")
    if theirs != ours:
        raise CheckpointError(f"checkpoint {path!r} holds adapters of a base model with other names or shapes")
    if (theirs := _find_sign(there, ALPHA)) != (ours := _find_sign(here, ALPHA)):
        raise CheckpointError(f"checkpoint {path!r} was saved with lora.alpha {theirs}; here it is {ours}")


def _find_sign(names: Iterable[str], prefix: str) -> str:
    return next((name.removeprefix(prefix) for name in names if name.startswith(prefix)), "")
