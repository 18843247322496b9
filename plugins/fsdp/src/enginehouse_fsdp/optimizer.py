"""AdamW over sharded parameters, with a schedule and clipping by the norm of the whole gradient."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from enginehouse_fsdp.gathering import count_parts, own_part
from enginehouse_torch.modeling.finite import check_step
from enginehouse_torch.modeling.schedule import learning_rate

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from enginehouse.engines.train import Metrics
    from enginehouse_fsdp.options import FSDPOptions

FUSED_DEVICES = ("cpu", "cuda", "xpu")
MOMENTS = ("exp_avg", "exp_avg_sq")


class ShardedAdamW:
    """Optimizer state and schedule of one rank's part of a model; `factors` scale the learning rate, by name.

    Attributes:
        step_number: number of optimizer steps taken.
    """

    def __init__(
        self, parameters: Mapping[str, torch.nn.Parameter], options: FSDPOptions, factors: Mapping[str, float]
    ):
        self._parameters = dict(parameters)
        self._options = options
        self._fixed = [parameter for name, parameter in parameters.items() if factors[name] == 0]
        self._device = next(iter(self._parameters.values())).device
        self._weight = 0.0
        self.step_number = 0
        self._adamw = torch.optim.AdamW(
            [
                {"params": alike, "factor": factor}
                for factor in dict.fromkeys(factors.values())
                for alike in _group_by_mesh(p for name, p in self._parameters.items() if factors[name] == factor)
            ],
            lr=options.lr,
            betas=options.betas,
            eps=options.eps,
            weight_decay=options.weight_decay,
            fused=self._device.type in FUSED_DEVICES,
        )

    def count(self, weight: float) -> None:
        """Add `weight` to the weight of the accumulated loss; a step divides the gradient by the sum over all ranks."""
        self._weight += weight

    def step(self) -> Metrics:
        """Normalise and clip the gradients, take a step, and zero them; collective. FSDP has summed them over ranks.

        If the norm of the gradients is not finite, or the weights of the losses (`count`) add up to 0 over all ranks,
        the gradients are zeroed without a step.

        Raises:
            NonFiniteWeights: the step made weights on some rank not finite.
        """
        for parameter in self._fixed:  # fixed parameters count neither in the norm nor in `finite`
            if parameter.grad is not None:
                own_part(parameter.grad).zero_()
        gradients = [parameter.grad for parameter in self._parameters.values() if parameter.grad is not None]
        sums = torch.tensor([self._weight, _squared_share(gradients)], dtype=torch.float64)
        if dist.is_initialized():
            dist.all_reduce(sums)
        weight, squared = sums.tolist()
        norm = math.sqrt(squared) / weight if weight else 0.0
        lr = learning_rate(self.step_number, self._options)
        finite = weight > 0 and norm < float("inf")  # False for nan
        metrics = {"grad_norm": norm, "lr": lr, "skipped": 0.0 if finite else 1.0}
        if finite:
            scale = min(1.0, self._options.max_grad_norm / (norm + 1e-6)) / weight
            torch._foreach_mul_([own_part(gradient) for gradient in gradients], scale)
            for group in self._adamw.param_groups:
                group["lr"] = lr * group["factor"]
            self._adamw.step()
            self.step_number += 1
            own = {name: own_part(parameter.detach()) for name, parameter in self._parameters.items()}
            check_step(list(own.values()), lambda: own, self.step_number, metrics)
        self._adamw.zero_grad(set_to_none=True)
        self._weight = 0.0
        return metrics

    def state(self) -> dict[str, torch.Tensor]:
        """Return both moments of each parameter, sharded like the parameter. The tensors are the optimizer's own.

        Their names are `"exp_avg.<parameter>"` and `"exp_avg_sq.<parameter>"`.
        """
        moments: dict[str, torch.Tensor] = {}
        for name, parameter in self._parameters.items():
            state = self._adamw.state[parameter]
            if not state:  # before the first step
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                for kind in MOMENTS:
                    state[kind] = torch.zeros_like(parameter, requires_grad=False)
            for kind in MOMENTS:
                moments[f"{kind}.{name}"] = state[kind]
        return moments

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors of `state` that exist, none before the first step."""
        states = self._adamw.state.values()
        return [state[moment] for state in states for moment in MOMENTS if moment in state]

    def restored(self, step_number: int) -> None:
        """Continue from `step_number`, after the caller has overwritten the tensors of `state()` with saved values."""
        self.step_number = step_number
        for parameter in self._parameters.values():
            self._adamw.state[parameter]["step"].fill_(float(step_number))


def _group_by_mesh(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Group tensors that are on the same ranks, because torch's operations on lists of tensors need the same mesh."""
    groups: dict[DeviceMesh | None, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(tensor)
    return list(groups.values())


def _squared_share(gradients: list[torch.Tensor]) -> float:
    """Return this rank's share of the squared norm of all gradients; ranks with the same part share it evenly."""
    if not gradients:
        return 0.0
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    norms = torch.stack(torch._foreach_norm([own_part(gradient) for gradient in gradients])).double()
    shares = [(count_parts(gradient) if isinstance(gradient, DTensor) else 1) / ranks for gradient in gradients]
    return (norms.square() @ norms.new_tensor(shares)).item()
