"""What vLLM's reload of weights gets wrong without a word, put right. The one module that knows vLLM's insides.

Measured with vLLM 0.32. Each function says which line it stands in for and what makes it superfluous; the tests named
fail without it, and pass once a later vLLM needs it no more.
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
"""For each parameter that several modules hold: the modules, and what they call it."""


def shared_parameters(model: torch.nn.Module) -> Shared:
    """The model's tied parameters. Before the reload: during it each module has its own."""
    holders = defaultdict(list)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                holders[id(parameter)].append((module, name))
    return [found for found in holders.values() if len(found) > 1]


def forget_packed_experts(model: torch.nn.Module) -> None:
    """Make vLLM pack a mixture's experts anew for its CPU kernels.

    Stands in for `UnquantizedFusedMoEMethod._setup_kernel` (`fused_moe/unquantized_fused_moe_method.py`), which packs
    only where `moe_kernel` is None, so at the first load alone. Superfluous once it packs at each load on CPU;
    elsewhere weights are copied in place, as CUDA graphs need it. Test: experts, `test_weights_models.py`.
    """
    if not current_platform.is_cpu():
        return
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def forget_packed_linears(model: torch.nn.Module) -> None:
    """Let go of what linear layers packed for CPU kernels, in no parameter: until a reload they cannot compute.

    Stands in for nothing: vLLM's CPU worker does not sleep. Reaches what `dispatch_cpu_unquantized_gemm`
    (`layers/utils.py`) leaves in `cpu_linear`; what experts packed beside their parameters stays. Superfluous once that
    worker sleeps. Test: `test_sleep.py`.
    """
    for module in model.modules():
        if hasattr(module, "cpu_linear"):
            module.cpu_linear = _without_weights


def _without_weights(*_given: object) -> torch.Tensor:
    raise RuntimeError("vllm's model has no weights since it slept")


def repack_tied(shared: Shared, loaded: set[int]) -> None:
    """Let the modules that share a parameter with one that was loaded pack it anew.

    Stands in for the branch "No weights were loaded" of `finalize_layerwise_processing` (`reload/layerwise.py`), which
    puts a tied head's parameter back, where the new values are, and leaves what was packed from the old ones for CPU
    kernels. Superfluous once that branch packs tied modules. Test: tied heads, `test_weights_models.py`.

    Args:
        shared: the tied parameters.
        loaded: `id` of the modules that were loaded themselves.
    """
    for holders in shared:
        for module, _ in holders:
            method = getattr(module, "quant_method", None)
            if id(module) not in loaded and isinstance(method, QuantizeMethodBase):
                method.process_weights_after_loading(module)


def loaded_modules(model: torch.nn.Module) -> set[int]:
    """`id` of the modules that got weights since the reload began; after `load_weights`, before it is finalized."""
    return {
        id(module)
        for module in model.modules()
        if not (info := get_layerwise_info(module)).can_load() or info.loaded_weights
    }


def unloaded_parameters(model: torch.nn.Module, shared: Shared, loaded: set[int]) -> list[str]:
    """vLLM's names of the parameters that did not get all their elements; after `load_weights`.

    Stands in for the warning "Failed to load weights" of `finalize_layerwise_processing`: vLLM goes on with the old
    values, or, where part of a parameter came, with whatever the memory held. Superfluous once it raises. Not looked
    at: scales of quantized attention, which need not be in a checkpoint; and padding of the vocabulary, which is not.
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
        wanted = {
            name: get_tensor_load_numel(parameter)
            for name, parameter in module._parameters.items()
            if parameter is not None and name not in SKIP_LOAD_TENSORS and (id(module), name) not in tied
        }
        touched = {name for name, _ in info.loaded_weights}
        absent = [name for name in wanted if name not in touched]
        if not absent and info.load_numel < sum(wanted.values()) and not isinstance(module, VocabParallelEmbedding):
            absent = list(wanted)
        missing += [f"{path}.{name}" for name in absent]
    return missing


def abandon_reload(model: torch.nn.Module, config: ModelConfig) -> None:
    """End a reload that failed in the midst: a model in which another reload can begin, of old and new layers mixed.

    Stands in for nothing: vLLM has no way back, and would add what the next reload brings to what this one left.
    Superfluous once it has one.
    """
    for module in model.modules():
        info = get_layerwise_info(module)
        if info.can_load():
            _place_kernel_tensors(module, info)
            info.reset()
    finalize_layerwise_reload(model, config)
