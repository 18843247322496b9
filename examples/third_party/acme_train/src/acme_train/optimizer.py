"""AdamW over ranks with equal replicas: each step sums gradients and loss weights over the ranks, and divides.

accelerate's `reduce` computes the sums. DDP's hooks cannot, because a rank's shard may be empty, and ranks may make
different numbers of passes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from accelerate import Accelerator
from enginehouse_torch.modeling.finite import check_step
from enginehouse_torch.modeling.schedule import learning_rate

from acme_train.train_options import AcmeTrainOptions


class Optimizer:
    """The optimizer of one rank, in the form that a checkpoint of `enginehouse_torch.modeling` saves.

    Args:
        parameters: trained parameters by name, each once.
        options: hyperparameters and schedule.
        accelerator: sums tensors over the ranks.

    Attributes:
        step_number: number of steps, without skipped ones.
    """

    def __init__(
        self, parameters: Mapping[str, torch.nn.Parameter], options: AcmeTrainOptions, accelerator: Accelerator
    ):
        self._parameters = dict(parameters)
        self._options = options
        self._accelerator = accelerator
        self._weight = 0.0
        self.step_number = 0
        self._adamw = torch.optim.AdamW(
            self._parameters.values(),
            lr=options.lr,
            betas=options.betas,
            eps=options.eps,
            weight_decay=options.weight_decay,
        )

    def count(self, weight: float) -> None:
        """Add to the loss's weight; the step divides its gradient by the weight of all ranks."""
        self._weight += weight

    def step(self) -> dict[str, float]:
        """Take one step, as `TrainEngine.optim_step` describes; collective."""
        for parameter in self._parameters.values():
            if parameter.grad is None:  # a rank without rows takes part too
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in self._parameters.values() if parameter.grad is not None]
        weight = torch.tensor(self._weight, device=gradients[0].device)
        *gradients, weight = self._accelerator.reduce([*gradients, weight], "sum")
        norm = float(torch.stack(torch._foreach_norm(gradients)).norm() / weight) if weight else 0.0
        taken = bool(weight) and norm < float("inf")  # False for nan
        lr = learning_rate(self.step_number, self._options)
        figures = {"grad_norm": norm, "lr": lr, "skipped": 0.0 if taken else 1.0}
        if taken:
            torch._foreach_mul_(gradients, min(1.0, self._options.max_grad_norm / (norm + 1e-6)) / float(weight))
            for group in self._adamw.param_groups:
                group["lr"] = lr
            for parameter, gradient in zip(self._parameters.values(), gradients, strict=True):
                parameter.grad = gradient
            self._adamw.step()
            self.step_number += 1
            check_step(list(self._parameters.values()), lambda: self._parameters, self.step_number, figures)
        self._adamw.zero_grad()
        self._weight = 0.0
        return figures

    # The methods that a checkpoint calls

    def state(self) -> dict[str, torch.Tensor]:
        """Return the live moments, by `"exp_avg.name"` and `"exp_avg_sq.name"`."""
        moments = {}
        for name, parameter in self._parameters.items():
            state = self._adamw.state[parameter]
            if not state:  # before the first step
                zeros = torch.zeros_like(parameter)
                state.update(step=torch.tensor(0.0), exp_avg=zeros, exp_avg_sq=zeros.clone())
            moments |= {f"{moment}.{name}": state[moment] for moment in ("exp_avg", "exp_avg_sq")}
        return moments

    def restored(self, step_number: int) -> None:
        """Continue from `step_number`, after the tensors of `state` were overwritten."""
        self.step_number = step_number
        for parameter in self._parameters.values():
            self._adamw.state[parameter]["step"].fill_(float(step_number))
