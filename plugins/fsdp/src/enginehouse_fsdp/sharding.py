"""Builds a Hugging Face model that is sharded from the start, so that no rank ever holds all of it.

Parameters are created and sharded on the meta device. Each rank then allocates its part, and reads it from the
safetensors files. Buffers that no checkpoint holds (rotary frequencies) are computed as the model is built.
"""

from __future__ import annotations

import contextlib
import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from enginehouse.errors import ConfigError, ModelError, listed
from enginehouse.plugin import ResolveError, resolve
from enginehouse.weights.names import stored_names, unique_state, weight_files
from enginehouse_fsdp import adapters
from enginehouse_fsdp.axes import CONTEXT, SHARD, TENSOR
from enginehouse_fsdp.context_parallel import check_sequence_split
from enginehouse_fsdp.experts import own_parts
from enginehouse_fsdp.tensor_parallel import split_matrices
from enginehouse_torch.modeling.finite import check_stored
from enginehouse_torch.modeling.holding import VALUE_HEAD, Holding, freeze
from enginehouse_torch.modeling.loading import empty_model, put_value_head, value_head_weight

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from enginehouse.engines.model import ModelSpec
    from enginehouse_fsdp.options import FSDPOptions

log = logging.getLogger(__name__)


def device_mesh(device: torch.device, sizes: dict[str, int]) -> DeviceMesh:
    """Return the mesh on which torch lays tensors out.

    The axis `cp` is merged into `dp_shard`, because its ranks also shard parameters and sum gradients.
    """
    sizes = {axis: size * (sizes.get(CONTEXT, 1) if axis == SHARD else 1) for axis, size in sizes.items()}
    sizes.pop(CONTEXT, None)
    return init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def context_group(device: torch.device, sizes: dict[str, int]) -> dist.ProcessGroup:
    """Return the process group of the ranks that share this rank's sequences."""
    model_axes = {axis: size for axis, size in sizes.items() if axis in (CONTEXT, TENSOR)}
    data = math.prod(size for axis, size in sizes.items() if axis not in model_axes)
    names = ("data", *model_axes)
    return init_device_mesh(device.type, (data, *model_axes.values()), mesh_dim_names=names).get_group(CONTEXT)


FORGETTING = (
    "debug:_clear_sharding_prop_cache",
    "_redistribute:clear_redistribute_planner_cache",
    "_redistribute:_gen_transform_infos.cache_clear",
    "_collective_utils:MeshTopoInfo.build_from_mesh.cache_clear",
)
"""Functions that clear torch's caches of meshes, in `torch.distributed.tensor` of 2.13; other versions lack some."""


def forget_meshes() -> None:
    """Clear torch's cache of how operations are split, before the process groups end.

    The keys of the cache are shapes and names of meshes. A later mesh with the same shape and names would therefore get
    the process groups of the earlier mesh, which no longer exist, or whose numbers now belong to other groups. A cached
    group also keeps its threads.
    """
    for reference in FORGETTING:
        with contextlib.suppress(ResolveError):
            resolve(f"torch.distributed.tensor.{reference}")()


def build_sharded_model(
    spec: ModelSpec, options: FSDPOptions, mesh: DeviceMesh, device: torch.device
) -> tuple[PreTrainedModel, Holding]:
    """Build, shard and load the model of `spec`. Parameters are float32, whatever dtype they compute in.

    Returns:
        The model and its `Holding`.

    Raises:
        ModelError: the directory holds no causal language model, lacks weights, or holds weights that belong to another
            model or are not finite.
        ConfigError: `fully_shard` rejects an option, or the model cannot be split over the axis `tp`.
    """
    model, holding = build_empty_model(spec)
    shard_model(model, spec, options, mesh, device)
    _load(model, spec, holding)
    adapters.initialize(model, spec.seed)
    return model.eval(), holding


def shard_model(
    model: PreTrainedModel, spec: ModelSpec, options: FSDPOptions, mesh: DeviceMesh, device: torch.device
) -> PreTrainedModel:
    """Shard a model on the meta device, and allocate this rank's part, uninitialised.

    Raises:
        ConfigError: as `build_sharded_model`.
    """
    model.tie_weights()  # outside of the context of empty parameters, so that FSDP sees tied parameters as one
    if options.lora is not None:
        adapters.add_adapters(model, options.lora, spec)
    data_axes = tuple(axis for axis in mesh.mesh_dim_names or () if axis != TENSOR)
    if options.context_parallel > 1:
        check_sequence_split(model, options.context_parallel, options.tensor_parallel)
    if options.tensor_parallel > 1:
        split_matrices(model, mesh[TENSOR])
    from torch.distributed._composable import checkpoint

    home = torch.device("cpu") if options.cpu_offload else device
    blocks = decoder_blocks(model)
    if options.activation_checkpointing:
        for block in blocks:
            checkpoint(block)
    _shard(model, blocks, spec, options, mesh[data_axes])
    if options.compile:
        for block in blocks:
            block.compile(dynamic=True)  # rows rarely have the same length

    def allocate(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_meta:
            return torch.empty_like(tensor, device=home)
        return tensor if isinstance(tensor, DTensor) else tensor.to(device)  # a tied parameter comes twice

    model._apply(allocate)
    model.tie_weights()  # again, because each module now has its own parameter
    return model


def build_empty_model(spec: ModelSpec) -> tuple[PreTrainedModel, Holding]:
    """Build the model with float32 parameters on the meta device and computed buffers; return its `Holding` too."""
    from accelerate import init_empty_weights

    model = empty_model(spec, init_empty_weights(include_buffers=False))
    removed: set[str] = set()
    if spec.head == "value":
        with init_empty_weights(include_buffers=False):
            removed = put_value_head(model, spec, torch.float32)
    holding = Holding.from_model(model, spec, removed)
    freeze(model, holding.unreached)
    return model, holding


def decoder_blocks(model: PreTrainedModel) -> list[torch.nn.Module]:
    """Return the repeated blocks, each a unit that is gathered and freed at once; empty if the model names none."""
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in kinds]


def reshard(model: torch.nn.Module) -> None:
    """Free the parameters that a forward pass left gathered, such as the parameters of the outermost unit."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _shard(
    model: PreTrainedModel,
    blocks: list[torch.nn.Module],
    spec: ModelSpec,
    options: FSDPOptions,
    mesh: DeviceMesh,
) -> None:
    half = None if spec.dtype == "float32" else getattr(torch, spec.dtype)
    offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if options.cpu_offload else OffloadPolicy()
    arguments: dict[str, Any] = {
        "mesh": mesh,
        # None: all but the outermost unit, which the backward pass needs first.
        "reshard_after_forward": None if options.reshard_after_forward else False,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=half, reduce_dtype=None if half is None else getattr(torch, options.reduce_dtype)
        ),
        "offload_policy": offload,
        **options.native,
    }
    # The outermost unit takes all other parameters. A model with a value head runs in two parts.
    roots = [model] if spec.head == "causal_lm" else [model.base_model, model.get_submodule(VALUE_HEAD)]
    try:
        for unit in [*blocks, *roots]:
            sharded = fully_shard(unit, **arguments)
            sharded.set_gradient_divide_factor(1.0)  # gradients are sums: their mean is over tokens, not ranks
            sharded.set_force_sum_reduction_for_comms(True)  # gloo has no other reduction
    except TypeError as error:
        raise ConfigError(f"fsdp: fully_shard refuses an argument of `native`: {error}") from error


def _load(model: PreTrainedModel, spec: ModelSpec, holding: Holding) -> None:
    """Read this rank's part of each parameter from the checkpoint's files; collective."""
    import torch.distributed.checkpoint as dcp

    path = Path(spec.path)
    stored = stored_names(path)
    state = adapters.base_state(unique_state(model, stored))
    head = state.pop(f"{VALUE_HEAD}.weight", None)
    form = holding.form
    if missing := sorted({part.name for name in state for part in form.parts(name)} - stored):
        raise ModelError(f"the weights in {spec.path!r} lack {listed(missing)}")
    with torch.no_grad():
        own = dict(own_parts(form, state))
        reader = dcp.HuggingFaceStorageReader(str(path))
        reader.fs.ls = lambda _: [str(file) for file in weight_files(path)]  # other files may repeat the weights
        dcp.load(own, storage_reader=reader, no_dist=not dist.is_initialized())
        if head is not None:
            assert isinstance(head, DTensor)
            whole = value_head_weight(model.config.get_text_config().hidden_size, spec).float().to(head.device)
            head.copy_(distribute_tensor(whole, head.device_mesh, head.placements))
        check_stored(path, ((name, t.to_local() if isinstance(t, DTensor) else t) for name, t in own.items()))


def unsharded_class(model: torch.nn.Module) -> type[torch.nn.Module]:
    """Return the class that a model had before `fully_shard` replaced it by its own."""
    return next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))
