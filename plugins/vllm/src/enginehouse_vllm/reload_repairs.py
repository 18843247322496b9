"""Repairs errors that vLLM's reload of weights makes silently. Only this module knows vLLM's internals of the reload.

For vLLM 0.32. Each function names the code that it stands in for and what will make it superfluous. The tests that it
names fail without it, and pass once a later vLLM no longer needs it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from vllm.config import ModelConfig
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import _place_kernel_tensors, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS
from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel
from vllm.platforms import current_platform

Shared = Sequence[Sequence[tuple[torch.nn.Module, str]]]
"""For each parameter that several modules hold: the modules, and their names for it."""


def shared_parameters(model: torch.nn.Module) -> Shared:
    """Return the model's tied parameters. Call it before the reload, because during the reload each module has its own
    parameter."""
    holders = defaultdict(list)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                holders[id(parameter)].append((module, name))
    return [modules for modules in holders.values() if len(modules) > 1]


def forget_packed_experts(model: torch.nn.Module) -> None:
    """Make vLLM pack a mixture's experts again for its CPU kernels.

    Stands in for `UnquantizedFusedMoEMethod._setup_kernel` (`fused_moe/unquantized_fused_moe_method.py`), which packs
    only where `moe_kernel` is None, so only at the first load. Superfluous once vLLM packs experts at each load on a
    CPU. On other devices vLLM copies weights in place, as CUDA graphs need it. Test: experts, `test_weights_models.py`.
    """
    if not current_platform.is_cpu():
        return
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def forget_packed_linears(model: torch.nn.Module) -> None:
    """Release the packed weights that linear layers keep for CPU kernels, outside their parameters.

    The layers cannot compute until a reload.

    Stands in for nothing, because vLLM's CPU worker does not sleep. It releases the weights that
    `dispatch_cpu_unquantized_gemm` (`layers/utils.py`) leaves in `cpu_linear`, but not the weights that experts have
    packed outside their parameters. Superfluous once vLLM's CPU worker sleeps. Test: `test_sleep.py`.
    """
    for module in model.modules():
        if hasattr(module, "cpu_linear"):
            module.cpu_linear = _without_weights


def _without_weights(*_args: object) -> torch.Tensor:
    raise RuntimeError("vllm's model has no weights since it slept")


def repack_tied(shared: Shared, loaded: set[int]) -> None:
    """Let the modules that share a parameter with a loaded module pack it again.

    Stands in for the branch "No weights were loaded" of `finalize_layerwise_processing` (`reload/layerwise.py`). It
    restores a tied head's parameter, which has the new values, but keeps what was packed from the old values for CPU
    kernels. Superfluous once that branch packs tied modules. Test: tied heads, `test_weights_models.py`.

    Args:
        shared: The tied parameters.
        loaded: `id` of the modules that were loaded themselves.
    """
    for holders in shared:
        for module, _ in holders:
            method = getattr(module, "quant_method", None)
            if id(module) not in loaded and isinstance(method, QuantizeMethodBase):
                method.process_weights_after_loading(module)


def packed_parameters(model: torch.nn.Module) -> set[int]:
    """Return `id` of the parameters that a module has packed for a CPU kernel, outside the parameter."""
    packed = (module for module in model.modules() if hasattr(module, "cpu_linear"))
    return {id(parameter) for module in packed for parameter in module.parameters(recurse=False)}


def loaded_modules(model: torch.nn.Module) -> set[int]:
    """Return `id` of the modules that `load_weights` filled. Call it before the reload is finalized."""
    return {
        id(module)
        for module in model.modules()
        if not (info := get_layerwise_info(module)).can_load() or info.loaded_weights
    }


def unloaded_parameters(model: torch.nn.Module, shared: Shared, loaded: set[int]) -> list[str]:
    """Return vLLM's names of the parameters that did not get all their elements from `load_weights`.

    Stands in for the warning "Failed to load weights" of `finalize_layerwise_processing`: vLLM continues with the old
    values or, if part of a parameter came, with whatever the memory held. Superfluous once it raises. Scales of
    quantized attention, which a checkpoint need not hold, and padding of the vocabulary are not checked.
    """
    tied = {
        (id(module), name)
        for holders in shared
        if any(id(module) in loaded for module, _ in holders)
        for module, name in holders
    }
    missing = []
    for path, module in model.named_modules():
        info = get_layerwise_info(module)
        if not info.can_load() or is_deferred_attention_layer(module):
            continue  # a layer is processed as soon as it has everything
        sizes = {
            name: get_tensor_load_numel(parameter)
            for name, parameter in module._parameters.items()
            if parameter is not None and name not in SKIP_LOAD_TENSORS and (id(module), name) not in tied
        }
        touched = {name for name, _ in info.loaded_weights}
        absent = [name for name in sizes if name not in touched]
        if not absent and info.load_numel < sum(sizes.values()) and not isinstance(module, VocabParallelEmbedding):
            absent = list(sizes)
        missing += [f"{path}.{name}" for name in absent]
    return missing


def abandon_reload(model: torch.nn.Module, config: ModelConfig) -> None:
    """End a reload that failed halfway. The model has old and new layers, and another reload can begin.

    Stands in for nothing: vLLM cannot end it, and would add the next reload to this one. Superfluous once it can.
    """
    for module in model.modules():
        info = get_layerwise_info(module)
        if info.can_load():
            _place_kernel_tensors(module, info)
            info.reset()
    finalize_layerwise_reload(model, config)
