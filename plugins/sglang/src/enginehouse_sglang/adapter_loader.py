"""Replaces the matrices of the served adapter inside SGLang's processes, for `loader.py`.

A replica has one adapter, under one id, and every request names it. SGLang's own way would be a new id for each
version; it cannot move a request to another id, and while requests are paused it waits for them for ever. So this
module uses SGLang's LoRA manager directly, as of the versions that the plugin allows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch

from enginehouse.engines.weights import WeightSyncError
from enginehouse.errors import listed
from enginehouse.weights.read_back import BITS, ReadRegions, Region
from enginehouse.weights.staged_source import StagedSource
from enginehouse_sglang.served_adapter import ADAPTER

MANAGERS: WeakKeyDictionary[torch.nn.Module, Any] = WeakKeyDictionary()
"""SGLang's LoRA manager by model, of which a process has one."""

PREFIX = "base_model.model."
PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
JOINED = {part: (joined, index) for joined, parts in PARTS.items() for index, part in enumerate(parts)}
"""By layer of the checkpoint, SGLang's layer with several of them, and the place in it."""


def install() -> None:
    """Let every process find its LoRA manager, and every request name the adapter. Call it before SGLang starts."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.lora.lora_manager.LoRAManager.init_state", _remember, HookType.AFTER)
    HookRegistry.register(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request", _name_adapter, HookType.BEFORE
    )


def _remember(_result: Any, manager: Any, *_args: Any, **_options: Any) -> None:
    MANAGERS[manager.base_model] = manager


def _name_adapter(_tokenizer_manager: Any, request: Any, *_args: Any, **_options: Any) -> None:
    """Name the adapter in a request that names none, as those of OpenAI clients do."""
    if request.lora_path is None:
        request.lora_path = ADAPTER


def replace_adapter(model: torch.nn.Module, source: StagedSource, settings: Mapping[str, Any]) -> list[ReadRegions]:
    """Serve the staged adapter, and compare what is then served with it. If that fails, the old adapter is served.

    Args:
        source: the matrices; none: an adapter that changes nothing.
        settings: as in an `adapter_config.json`.

    Returns:
        What `ReadBack.compare` returns.
    """
    from sglang.srt.lora.lora import LoRAAdapter
    from sglang.srt.lora.lora_config import LoRAConfig

    manager = MANAGERS.get(model)
    if manager is None:
        raise WeightSyncError("sglang has no adapters: it was started without them, or its hooks have changed")
    sent = {name: tensor.clone() for name, tensor in source}  # SGLang keeps them
    if lacking := [name for name in sent if _find_layer(manager, name) is None]:
        raise WeightSyncError(f"sglang adds no adapter to the layers of {listed(lacking)}", lacking)
    adapter_id = next(key for key, reference in manager.lora_refs.items() if reference.lora_name == ADAPTER)
    adapter = LoRAAdapter(
        adapter_id,
        LoRAConfig.from_dict(dict(settings)),
        manager.base_hf_config,
        manager.load_config,
        manager.lora_backend,
        base_model=manager.base_model,
    )
    adapter.initialize_weights_from_tensors(_complete(manager, sent))
    manager.fetch_new_loras({None, adapter_id})
    before = manager.loras[adapter_id]
    try:
        _put(manager, adapter_id, adapter)
        return read_back(manager, adapter_id, source)
    except BaseException:
        _put(manager, adapter_id, before)
        raise


def _put(manager: Any, adapter_id: str, adapter: Any) -> None:
    """Fill the buffers that the kernels read."""
    slot = manager.memory_pool.get_buffer_id(adapter_id)
    manager.memory_pool.load_lora_weight_to_buffer(
        adapter_id, slot, adapter, manager.lora_modules, manager.embed_tokens_module, manager.lm_head_module
    )
    manager.loras[adapter_id], manager.configs[adapter_id] = adapter, adapter.config
    manager._notify_lora_slots_updated({slot})


def _split_name(name: str) -> tuple[str, str, str]:
    """Split `base_model.model.model.layers.0.mlp.up_proj.lora_A.weight`: `model.layers.0.mlp`, `up_proj`, `lora_A`."""
    path, matrix, _ = name.removeprefix(PREFIX).rsplit(".", 2)
    parent, _, layer = path.rpartition(".")
    return parent, layer, matrix


def _find_layer(manager: Any, name: str) -> tuple[int, str, Any] | None:
    """Return the number of the decoder layer, SGLang's name of the buffer, and SGLang's layer of a matrix; None if
    SGLang adds no adapter there. Two layers with the same buffer would overwrite each other's matrices."""
    from sglang.srt.layers.utils import get_layer_id

    _, layer, _ = _split_name(name)
    number = get_layer_id(name)
    if number is None or number >= len(manager.lora_modules):
        return None
    joined, _ = JOINED.get(layer, (layer, 0))
    layers = [found for path, found in manager.lora_modules[number].items() if path.rpartition(".")[2] == joined]
    return (number, joined, layers[0]) if len(layers) == 1 else None


def _complete(manager: Any, sent: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Add zeros for layers without an adapter that SGLang joins with layers that have one, because it needs all."""
    whole = dict(sent)
    for name, tensor in sent.items():
        parent, layer, matrix = _split_name(name)
        found = _find_layer(manager, name)
        if layer not in JOINED or found is None:
            continue
        for part, rows in zip(PARTS[JOINED[layer][0]], _output_sizes(found[2].base_layer), strict=True):
            other = f"{PREFIX}{parent}.{part}.{matrix}.weight"
            if other not in whole:
                whole[other] = tensor.new_zeros(tensor.shape if matrix == "lora_A" else (rows, tensor.shape[1]))
    return whole


def _output_sizes(layer: Any) -> tuple[int, ...]:
    """Return the number of rows of each matrix that SGLang has joined in a layer, on all ranks together."""
    from sglang.srt.layers.linear import MergedColumnParallelLinear, QKVParallelLinear

    if isinstance(layer, QKVParallelLinear):
        keys = layer.total_num_kv_heads * layer.head_size
        return layer.total_num_heads * layer.head_size, keys, keys
    return tuple(layer.output_sizes) if isinstance(layer, MergedColumnParallelLinear) else (layer.output_size,)


def read_back(manager: Any, adapter_id: str, source: StagedSource) -> list[ReadRegions]:
    """Compare the matrices that SGLang computes with with the staged matrices; see `ReadBack.compare`."""
    read, wrong = [], []
    for (name, staged), total in zip(source, source.sums, strict=True):
        regions = []
        for held, part in _held_parts(manager, adapter_id, name, staged):
            bits = BITS[held.element_size()]
            equal = held.shape == part.shape and held.dtype == part.dtype
            if not equal or not torch.equal(held.cpu().contiguous().view(bits), part.contiguous().view(bits)):
                wrong.append(name)
            regions.append(Region.of_part(part, staged).as_plain_data())
        read.append((total, regions))
    if wrong:
        raise WeightSyncError(f"sglang does not hold {listed(wrong)} as sent", wrong)
    return read


def _held_parts(
    manager: Any, adapter_id: str, name: str, staged: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield regions of the buffers that the kernels read, each with the region of a staged matrix that belongs there.
    With tensor parallelism a process holds all of A or of B, and some columns or rows of the other."""
    from sglang.srt.distributed.utils import get_group_rank_size
    from sglang.srt.layers.linear import QKVParallelLinear, ReplicatedLinear, RowParallelLinear

    found = _find_layer(manager, name)
    assert found is not None
    number, joined, adapted = found
    _, layer, matrix = _split_name(name)
    pool, base = manager.memory_pool, adapted.base_layer
    slot, rank = pool.get_buffer_id(adapter_id), manager.loras[adapter_id].config.r
    sizes = _output_sizes(base)
    places = [JOINED[layer][1]] if layer in JOINED else range(len(sizes))
    process = 0 if isinstance(base, ReplicatedLinear) else get_group_rank_size(base.tp_group)[0]
    if matrix == "lora_A":
        if isinstance(base, RowParallelLinear):
            width = base.input_size_per_partition
            staged = staged[:, process * width : (process + 1) * width]
        for place in places:
            yield pool.A_buffer[joined][number][slot, place * rank : (place + 1) * rank], staged
        return
    for place in places:
        begin, end = adapted.lora_offsets[place : place + 2]
        rows = staged if layer in JOINED else staged[sum(sizes[:place]) : sum(sizes[: place + 1])]
        if not isinstance(base, RowParallelLinear | ReplicatedLinear):
            part = process
            if isinstance(base, QKVParallelLinear) and place > 0:
                part = get_group_rank_size(base.kv_tp_group)[0] // base.num_kv_head_replicas
            rows = rows[part * (end - begin) : (part + 1) * (end - begin)]
        yield pool.B_buffer[joined][number][slot, begin:end, :rank], rows
