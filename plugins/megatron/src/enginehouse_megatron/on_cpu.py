"""Lets megatron-core 0.16 run on a CPU with gloo. An engine on a GPU uses nothing of this module.

megatron-core is written for GPUs: it makes tensors on the device "cuda", and asks `torch.cuda` for the current device.
Each function below names the lines that it replaces, and can be removed once these lines use the device of the model.
Replacing parts of `torch.cuda` breaks nothing: without a GPU they only raise errors, and all engines of a process use
the same device.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

from enginehouse_megatron import kernels  # noqa: F401  before all else of megatron-core

# isort: split
from megatron.core import utils
from megatron.core.optimizer import clip_grads, distrib_optimizer, optimizer
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel import random
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

CPU = torch.device("cpu")

NAMING_CUDA: tuple[Any, ...] = (
    schedules.forward_backward_no_pipelining,  # schedules.py:596
    schedules.forward_backward_pipelining_with_interleaving,  # schedules.py:983
    schedules.forward_backward_pipelining_without_interleaving,  # schedules.py:2138
    optimizer.MixedPrecisionOptimizer.__init__,  # optimizer.py:473, 481, 485
    distrib_optimizer.DistributedOptimizer._build_model_and_main_param_groups,  # distrib_optimizer.py:361, 420, 433
    distrib_optimizer.DistributedOptimizer.__init__,  # distrib_optimizer.py:582
    clip_grads.get_grad_norm_fp32,  # clip_grads.py:90, 103, 115
    clip_grads.clip_grad_by_total_norm_fp32,  # clip_grads.py:167, 174
    utils.local_multi_tensor_l2_norm,  # utils.py:1207
)
"""Functions that contain `device="cuda"`, or compare a tensor's type with `"torch.cuda.FloatTensor"`."""

_done = False


def adapt(device: str) -> None:
    """Make megatron-core run on this process's CPU if that is the engine's `device`; a second call does nothing."""
    global _done
    if _done or device != "cpu":
        return
    _done = True
    for function in NAMING_CUDA:
        _say_cpu(function)
    # Used as `device=torch.cuda.current_device()`: rotary_pos_embedding.py:162, utils.py:631 (buffers of sequence
    # parallelism), mappings.py:91, 141, p2p_communication.py:190, 313, param_and_grad_buffer.py:783, 800.
    torch.cuda.current_device = lambda: CPU  # type: ignore[assignment,return-value]
    # p2p_communication.py:242, 398 wait for operations that gloo has finished when `wait` returns.
    torch.cuda.synchronize = lambda device=None: None
    # language_module.py:244 calls it for an embedding tied over pipeline stages.
    torch.Tensor.cuda = lambda self, *args, **arguments: self  # type: ignore[method-assign,assignment]
    # random.py:41 and 72: recomputing activations restores these states, and a CPU has one generator.
    random._get_cuda_rng_state = lambda *args, **arguments: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **arguments: torch.set_rng_state(state)
    # router.py:531 is compiled, which takes seconds to minutes on a CPU, for a few additions.
    TopKRouter._apply_expert_bias = TopKRouter._apply_expert_bias._torchdynamo_orig_callable
    # token_dispatcher.py:445 makes this stream, which `_list_splits` does not use.
    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = "none"
    MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = _list_splits


def _list_splits(
    self: MoEAlltoAllTokenDispatcher, point: str, tokens_per_expert: torch.Tensor | None = None
) -> torch.Tensor | None:
    """Turn sizes for all-to-all into plain numbers, as token_dispatcher.py:862 does by copying them to the CPU."""
    if point == self.cuda_dtoh_point and not self.drop_and_pad:
        for name in ("input_splits", "output_splits", "output_splits_tp"):
            if (splits := getattr(self, name)) is not None:
                setattr(self, name, splits.tolist())
    return tokens_per_expert


def _say_cpu(function: Callable[..., Any]) -> None:
    """Replace the constants that name a GPU, in a function and in functions inside it."""
    function = getattr(function, "__func__", function)
    while (wrapped := getattr(function, "__wrapped__", None)) is not None:
        function = wrapped
    function.__code__ = _without_cuda(function.__code__)


def _without_cuda(code: types.CodeType) -> types.CodeType:
    return code.replace(co_consts=tuple(_replace_constant(constant) for constant in code.co_consts))


def _replace_constant(constant: Any) -> Any:
    if isinstance(constant, types.CodeType):
        return _without_cuda(constant)
    if isinstance(constant, tuple):
        return tuple(_replace_constant(item) for item in constant)
    if constant == "cuda":
        return "cpu"
    if isinstance(constant, str) and constant.startswith("torch.cuda.") and constant.endswith("Tensor"):
        return "torch." + constant.removeprefix("torch.cuda.")
    return constant
