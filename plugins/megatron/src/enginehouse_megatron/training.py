"""Gradients and optimizer: megatron-core's data-parallel buffers and distributed optimizer around a rank's part.

Each data-parallel rank keeps the optimizer state, and in half precision the float32 copy, of its share of the
parameters (Rajbhandari et al. 2020, stage 1). Gradients are summed over ranks once a step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from enginehouse_megatron import kernels  # noqa: F401  before all else of megatron-core

# isort: split
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
    """What a rank needs to train its part of the model.

    Args:
        models: the parts, as `build.callable_part` gave them; their parameters become views of buffers.
        settings: megatron-core's config of it.
        options: learning rate, schedule and the rest.
        own_weights: gives this rank's part of each weight, by its Hugging Face name.

    Attributes:
        models: what is called to compute with gradients, one for each virtual stage.
        optimizer: megatron-core's.
        step_number: optimizer steps taken.
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
        self.models = [
            DistributedDataParallel(
                settings,
                DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True),
                model,
            )
            for model in models
        ]
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
            config_overrides={},  # weight decay of every parameter, as every engine here has it
        )
        self._weight = 0.0
        self.step_number = 0
        self.clear()

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Within, gradients are added up and not summed over ranks: that is done once, at the step."""
        with contextlib.ExitStack() as stack:
            for model in self.models:
                stack.enter_context(model.no_sync())
            yield

    def count(self, weight: float) -> None:
        """Add to what the accumulated loss counts: the gradient of a step is divided by the sum over all ranks."""
        self._weight += weight

    def step(self) -> Metrics:
        """Sum over ranks, normalise, clip, step, zero; collective.

        Nothing changes but the gradients where their norm is not finite, or where no rank counted anything.

        Raises:
            NonFiniteWeights: the step left weights that are not finite, on whichever rank.
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
        figures = {"grad_norm": norm, "lr": lr, "skipped": 0.0 if finite else 1.0}
        if finite:
            for one in self.optimizer.chained_optimizers:
                if parameters := one.get_parameters():
                    clip_grad_by_total_norm_fp32(parameters, self._options.max_grad_norm, norm)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step_with_ready_grads()
            self.step_number += 1
            own = [parameter.detach() for model in self.models for parameter in model.parameters()]
            check_step(own, self._own_weights, self.step_number, figures)
        self.clear()
        return figures

    def restored(self, step_number: int) -> None:
        """Go on from `step_number` after the optimizer's state was loaded, with this run's own hyperparameters."""
        self.step_number = step_number
        for group in self.optimizer.param_groups:
            group["weight_decay"] = self._options.weight_decay
            group["betas"] = self._options.betas
            group["eps"] = self._options.eps
        for one in self.optimizer.chained_optimizers:
            for state in one.optimizer.state.values():
                if (
                    "step" in state
                ):  # distrib_optimizer.py:818 gives all parameters one tensor, which each then counts up
                    state["step"] = torch.tensor(float(step_number))

    def gradients(self) -> list[torch.Tensor]:
        """The buffers that gradients are added up in: all there are, between two steps too."""
        return [
            buffer.grad_data for model in self.models for buffer in (*model.buffers, *model.expert_parallel_buffers)
        ]

    def optimizer_state(self) -> list[torch.Tensor]:
        """This rank's moments, and what the optimizer steps on: in half precision its float32 copy of parameters, else
        views of them."""
        found: list[torch.Tensor] = []
        for one in self.optimizer.chained_optimizers:
            for group in one.param_groups:
                found += group["params"]
            for state in one.optimizer.state.values():
                found += [value for value in state.values() if torch.is_tensor(value)]
        return found

    def clear(self) -> None:
        """Forget accumulated gradients."""
        for model in self.models:
            model.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._weight = 0.0
