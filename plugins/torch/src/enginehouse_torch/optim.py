"""AdamW over all trained parameters at once, held in flat fp32 buffers.

Parameters and gradients are views of one buffer each. Zeroing, the sum over ranks, the norm, clipping and the step are
one operation each, whatever the number of parameters; a small model is bound by the number of operations.

Half-precision parameters have an fp32 copy that the optimizer updates, and their gradients are accumulated in fp32, so
that updates smaller than the parameter's precision are not lost.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping

import torch
import torch.distributed as dist

from enginehouse.engines.options import GroupedTrainOptions
from enginehouse_torch.modeling.finite import find_not_finite, lost_weights_error
from enginehouse_torch.modeling.schedule import learning_rate, lr_factors

ALIGNMENT = 16
"""Each parameter begins at a multiple of this number of elements: 64 bytes, a cache line."""
ALL_REDUCE_ELEMENTS = 1 << 28
"""Maximum number of elements of one all-reduce: 1 GiB."""
NORM_BLOCK = 4096
"""Number of elements whose squares are summed together."""
FUSED_DEVICES = ("cpu", "cuda", "xpu")
MOMENTS = ("exp_avg", "exp_avg_sq")


class FlatAdamW:
    """Gradients, optimizer state and schedule of a model whose ranks hold equal replicas.

    Each trained parameter and its `grad` become views of this object's buffers. Half-precision parameters keep their
    storage, and each step copies the new values to them.

    Args:
        parameters: trained parameters by name, each once, all on one device.
        options: hyperparameters and schedule.
        world_size: ranks to sum gradients over; 1 needs no process group.
        values: buffer that `gather_values` made of the parameters; None: make it here.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        options: GroupedTrainOptions,
        world_size: int,
        values: torch.Tensor | None = None,
    ):
        self.options = options
        self.world_size = world_size
        self.step_number = 0
        """Optimizer steps taken; skipped steps do not count."""
        self._places, ends = lay_out(parameters, options)
        self._parameters = {name: parameters[name] for name in self._places}
        device = next(iter(self._parameters.values())).device
        size = max(ends.values())
        self._fixed = ends.get(0.0, 0)
        """Number of leading elements whose learning rate is 0."""
        self._values = gather_values(parameters, options) if values is None else values
        # The last element, after the gradients, is the loss's weight, so that one all-reduce sums both.
        self.sums = torch.zeros(size + 1, device=device)
        self._gradients = self.sums[:size]
        for name, parameter in self._parameters.items():
            gradient = self._view(self._gradients, name)
            parameter.grad = gradient if parameter.dtype == torch.float32 else None
            if parameter.dtype != torch.float32:
                parameter.register_post_accumulate_grad_hook(_accumulate_into(gradient))
        groups = []
        for start, (factor, end) in zip((0, *ends.values()), ends.items(), strict=False):
            flat = torch.nn.Parameter(self._values[start:end])
            flat.grad = self._gradients[start:end]
            groups.append({"params": [flat], "factor": factor})
        self._adamw = torch.optim.AdamW(
            groups,
            lr=options.lr,
            betas=options.betas,
            eps=options.eps,
            weight_decay=options.weight_decay,
            fused=device.type in FUSED_DEVICES,
        )

    def _view(self, flat: torch.Tensor, name: str) -> torch.Tensor:
        """Return a parameter's part of a flat buffer, in the parameter's shape."""
        start, size = self._places[name]
        return flat[start : start + size].view(self._parameters[name].shape)

    def count(self, weight: float) -> None:
        """Add `weight` to the weight of the accumulated loss; a step divides the gradient by the sum over all ranks."""
        self.sums[-1] += weight

    def step(self) -> dict[str, float]:
        """Sum the gradients over ranks, normalise and clip them, take a step, and zero them; collective.

        If the norm of the gradients is not finite, or the weights of the losses (`count`) add up to 0 over all ranks,
        the gradients are zeroed without a step.

        Returns:
            `grad_norm` before clipping, `lr` of this step without factors, `skipped` (0.0 or 1.0); equal on every rank.

        Raises:
            NonFiniteWeights: the step made weights not finite. All ranks name the same weights.
        """
        self._gradients[: self._fixed].zero_()  # fixed parameters count neither in the norm nor in `finite`
        if self.world_size > 1:
            for part in self.sums.split(ALL_REDUCE_ELEMENTS):
                dist.all_reduce(part)
        lr = learning_rate(self.step_number, self.options)
        norm, weight = torch.stack((_norm(self._gradients), self.sums[-1])).tolist()
        norm = norm / weight if weight else 0.0
        finite = weight > 0 and norm < float("inf")  # False for nan
        metrics = {"grad_norm": norm, "lr": lr, "skipped": 0.0 if finite else 1.0}
        if finite:
            self._gradients.mul_(min(1.0, self.options.max_grad_norm / (norm + 1e-6)) / weight)
            for group in self._adamw.param_groups:
                group["lr"] = lr * group["factor"]
            self._adamw.step()
            self.step_number += 1
            if not _norm(self._values).isfinite():
                lost = find_not_finite({name: self._view(self._values, name) for name in self._parameters})
                raise lost_weights_error(lost, self.step_number, metrics)
            self.publish()
        self.sums.zero_()
        return metrics

    def publish(self) -> None:
        """Copy the fp32 values to the half-precision parameters."""
        if copies := self.float32_copies():
            with torch.no_grad():
                torch._foreach_copy_(list(copies), list(copies.values()))

    def float32_copies(self) -> dict[torch.nn.Parameter, torch.Tensor]:
        """Return the fp32 copies of half-precision parameters that the optimizer updates. Call `publish` after writing
        to one of them."""
        return {p: self._view(self._values, n) for n, p in self._parameters.items() if p.dtype != torch.float32}

    def state(self) -> dict[str, torch.Tensor]:
        """Return views of the optimizer's moments of each parameter, by `"exp_avg.name"` and `"exp_avg_sq.name"`."""
        self._ensure_moments()
        flats = self._flats()
        ends = list(itertools.accumulate(flat.numel() for flat in flats))
        moments = {}
        for name, parameter in self._parameters.items():
            start, size = self._places[name]
            group = bisect.bisect_right(ends, start)
            start -= ends[group] - flats[group].numel()
            for kind in MOMENTS:
                moment = self._adamw.state[flats[group]][kind]
                moments[f"{kind}.{name}"] = moment[start : start + size].view(parameter.shape)
        return moments

    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors held except the gradients and their sums (`sums`)."""
        return [self._values, *(tensor for flat in self._flats() for tensor in self._adamw.state[flat].values())]

    def restored(self, step_number: int) -> None:
        """Continue from `step_number`, after the caller has overwritten the tensors of `state()` with saved values."""
        self.step_number = step_number
        for flat in self._flats():
            self._adamw.state[flat]["step"].fill_(float(step_number))

    def _flats(self) -> list[torch.nn.Parameter]:
        """Return the slices of the buffer of values, one for each learning rate."""
        return [group["params"][0] for group in self._adamw.param_groups]

    def _ensure_moments(self) -> None:
        """Create the moments if no step has been taken."""
        for flat in self._flats():
            if not self._adamw.state[flat]:
                self._adamw.state[flat] = {
                    "step": torch.zeros((), dtype=torch.float32, device=flat.device),
                    "exp_avg": torch.zeros_like(flat),
                    "exp_avg_sq": torch.zeros_like(flat),
                }


def lay_out(
    parameters: Mapping[str, torch.nn.Parameter], options: GroupedTrainOptions
) -> tuple[dict[str, tuple[int, int]], dict[float, int]]:
    """Return each parameter's first element and size in a flat buffer, and the end of each learning rate's part.

    Parameters with the same factor in `options.lr_groups` are adjacent.
    """
    factors = lr_factors(parameters, options)
    places: dict[str, tuple[int, int]] = {}
    ends: dict[float, int] = {}
    size = 0
    for name in sorted(parameters, key=lambda name: factors[name]):
        places[name] = (size, parameters[name].numel())
        size += -(-parameters[name].numel() // ALIGNMENT) * ALIGNMENT
        ends[factors[name]] = size
    return places, ends


@torch.no_grad()
def gather_values(parameters: Mapping[str, torch.nn.Parameter], options: GroupedTrainOptions) -> torch.Tensor:
    """Copy parameters to one flat fp32 buffer, and make float32 parameters views of it.

    Call this before a parameter is lent, because float32 parameters move to the buffer.
    """
    places, ends = lay_out(parameters, options)
    values = torch.zeros(max(ends.values()), device=next(iter(parameters.values())).device)
    for name, (start, size) in places.items():
        place = values[start : start + size].view(parameters[name].shape)
        place.copy_(parameters[name])
        if parameters[name].dtype == torch.float32:
            parameters[name].data = place
    return values


def _norm(flat: torch.Tensor) -> torch.Tensor:
    """Return the 2-norm of a flat fp32 tensor, by blocks.

    On a CPU torch sums squares in a few fp32 accumulators, and is off by 1e-3 of the norm at 20 million elements.
    """
    whole = flat.numel() // NORM_BLOCK * NORM_BLOCK
    blocks = torch.linalg.vector_norm(flat[:whole].view(-1, NORM_BLOCK), dim=1)
    return torch.linalg.vector_norm(torch.cat((blocks, torch.linalg.vector_norm(flat[whole:])[None])))


def _accumulate_into(place: torch.Tensor):
    """Return a hook that adds a half-precision gradient to its fp32 place and frees it."""

    def accumulate(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            place.add_(parameter.grad)
            parameter.grad = None

    return accumulate
