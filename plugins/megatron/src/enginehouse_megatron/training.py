"""Gradients and optimizer of a rank's part of the model, by megatron-core's buffers and distributed optimizer.

Each data-parallel rank keeps the optimizer state of its share of the parameters and, in half precision, their float32
copy (Rajbhandari et al. 2020, stage 1). Gradients are summed over ranks once a step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer import ChainedOptimizer

from enginehouse_torch.modeling.finite import check_step
from enginehouse_torch.modeling.schedule import learning_rate

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from enginehouse.engines.train import Metrics
    from enginehouse_megatron.options import MegatronOptions


class BufferedTraining:
    """Trains a rank's parts of the model, as `build.callable_part` returns them. Parameters become views of buffers.

    Args:
        own_weights: Returns this rank's part of each weight by its Hugging Face name.

    Attributes:
        models: Modules that compute with gradients, one for each virtual stage.
        step_number: Number of optimizer steps taken.
    """

    def __init__(
        self,
        models: Sequence[torch.nn.Module],
        settings: TransformerConfig,
        options: MegatronOptions,
        own_weights: Callable[[], Mapping[str, torch.Tensor]],
    ):
        self._options = options
        self._own_weights = own_weights
        buffers = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
        self.models = [DistributedDataParallel(settings, buffers, model) for model in models]
        self.optimizer: ChainedOptimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=options.lr,
                weight_decay=options.weight_decay,
                adam_beta1=options.betas[0],
                adam_beta2=options.betas[1],
                adam_eps=options.eps,
                clip_grad=options.max_grad_norm,
                bf16=settings.bf16,
                params_dtype=settings.params_dtype,
                use_distributed_optimizer=True,
            ),
            self.models,
            config_overrides={},  # weight decay of every parameter, as in every engine here
        )
        self._weight = 0.0
        self.step_number = 0
        self.clear()

    def take_values(self, value_of: Callable[[torch.nn.Parameter], torch.Tensor]) -> None:
        """Replace the float32 copies of half-precision parameters by more precise values, whole ones by parameter.

        Not by megatron-core's own `reload_model_params(state_dict)`: it finds names by parts of them, and the first
        expert's name is a part of the eleventh's.
        """
        for optimizer in self.optimizer.chained_optimizers:
            if optimizer.is_stub_optimizer:
                continue
            groups = zip(optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups, strict=True)
            for parameter, copy in (pair for group in groups for pair in zip(*group, strict=True)):
                own = optimizer._get_model_param_range_map(parameter)["param"]
                copy.data.copy_(value_of(parameter).reshape(-1)[own.start : own.end])

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Accumulate gradients without summing them over ranks, which the step does once."""
        with contextlib.ExitStack() as stack:
            for model in self.models:
                stack.enter_context(model.no_sync())
            yield

    def count(self, weight: float) -> None:
        """Add `weight` to the weight of the accumulated loss; a step divides the gradient by the sum over all ranks."""
        self._weight += weight

    def step(self) -> Metrics:
        """Sum the gradients over ranks, normalise and clip them, take a step, and zero them; collective.

        If the norm of the gradients is not finite, or the weights of the losses (`count`) add up to 0 over all ranks,
        the gradients are zeroed without a step.

        Raises:
            NonFiniteWeights: The step made weights on some rank not finite.
        """
        counted = torch.tensor(self._weight, dtype=torch.float64)
        dist.all_reduce(counted)
        weight = float(counted)
        finalize_model_grads(self.models)
        if weight:
            for model in self.models:
                model.scale_gradients(1.0 / weight)
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        lr = learning_rate(self.step_number, self._options)
        finite = weight > 0 and norm < float("inf")  # False for nan
        metrics = {"grad_norm": norm, "lr": lr, "skipped": 0.0 if finite else 1.0}
        if finite:
            for optimizer in self.optimizer.chained_optimizers:
                if parameters := optimizer.get_parameters():
                    clip_grad_by_total_norm_fp32(parameters, self._options.max_grad_norm, norm)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step_with_ready_grads()
            self.step_number += 1
            own = [parameter.detach() for model in self.models for parameter in model.parameters()]
            check_step(own, self._own_weights, self.step_number, metrics)
        self.clear()
        return metrics

    def _iter_states(self) -> Iterator[dict[str, torch.Tensor]]:
        for optimizer in self.optimizer.chained_optimizers:
            yield from optimizer.optimizer.state.values()

    def resume(self, step_number: int) -> None:
        """Continue from `step_number` after the optimizer's state was loaded, with this run's own hyperparameters."""
        self.step_number = step_number
        for group in self.optimizer.param_groups:
            group["weight_decay"] = self._options.weight_decay
            group["betas"] = self._options.betas
            group["eps"] = self._options.eps
        for state in self._iter_states():
            if "step" in state:  # distrib_optimizer.py:818 gives all parameters one tensor, which each would increment
                state["step"] = torch.tensor(float(step_number))

    def gradients(self) -> list[torch.Tensor]:
        """Return the buffers in which gradients accumulate. The same buffers are used in every step."""
        return [
            buffer.grad_data for model in self.models for buffer in (*model.buffers, *model.expert_parallel_buffers)
        ]

    def optimizer_state(self) -> list[torch.Tensor]:
        """Return this rank's moments and float32 values: copies of half-precision parameters, views of all others."""
        groups = [group for optimizer in self.optimizer.chained_optimizers for group in optimizer.param_groups]
        tensors: list[torch.Tensor] = [parameter for group in groups for parameter in group["params"]]
        return tensors + [value for state in self._iter_states() for value in state.values() if torch.is_tensor(value)]

    def clear(self) -> None:
        """Forget accumulated gradients."""
        for model in self.models:
            model.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._weight = 0.0
