"""Calls a loss under test on made-up samples, as an engine calls it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from enginehouse.data import Batch, Ragged, UnknownColumnError
from enginehouse.engines.train import LossValue, Max, Mean, TokenView, merge_metrics, metric_values
from enginehouse.errors import nearest
from enginehouse.plugin import Loss, resolve
from enginehouse_testing.samples import OUTPUTS, now, samples
from enginehouse_testing.trial import Trial


class ViewColumns(dict[str, torch.Tensor]):
    """Columns of a view. The error for a missing column says how to add it."""

    def __missing__(self, name: str) -> torch.Tensor:
        raise UnknownColumnError(
            f"the suite's samples have no column {name!r}. {nearest(name, self)}. If another part of the algorithm "
            f'adds it, name it: columns = {{{name!r}: "row"}}, or "token"'
        )


@dataclass(frozen=True, slots=True)
class LossTotals:
    """Sums over the micro-batches on which a loss was called.

    Attributes:
        metrics: metrics as they would be logged.
        gradient: gradient of the total with respect to the output that the loss depends on, `(tokens,)`; 0 if the total
            has no gradient.
    """

    total: float
    weight: float
    metrics: Mapping[str, float]
    gradient: torch.Tensor

    def difference(self, other: LossTotals) -> tuple[float, str]:
        """Return the largest difference of any number, relative if numbers exceed 1, and its place."""
        pairs = {
            "the total": (self.total, other.total),
            "the weight": (self.weight, other.weight),
            **{
                f"metric {name!r}": (self.metrics.get(name), other.metrics.get(name))
                for name in {**self.metrics, **other.metrics}
            },
        }
        differences = [(_difference(*pair), f"{what} is {pair[0]}, not {pair[1]}") for what, pair in pairs.items()]
        scale = max(1.0, float(other.gradient.abs().max()))
        gradient = float((self.gradient - other.gradient).abs().max()) / scale
        differences.append((gradient, f"the gradient of a token differs by {gradient * scale:.3g}"))
        return max(differences, key=lambda pair: math.inf if math.isnan(pair[0]) else pair[0])


def _difference(number: float | None, right: float | None) -> float:
    if number is None or right is None:
        return math.inf
    return abs(number - right) / max(1.0, abs(right))


@dataclass(frozen=True, slots=True)
class LossTrial(Trial):
    """Calls a loss with its arguments and additional columns."""

    record: Loss

    def samples(self) -> Batch:
        """Return samples in which every row has tokens that count."""
        return samples(self.given.columns)

    def view(self, batch: Batch, device: str = "cpu") -> TokenView:
        """Return the view of a copy of a micro-batch. The outputs of the view are leaf tensors that collect a
        gradient."""
        offsets = batch.ragged("input_ids").offsets
        outputs = {name: batch.ragged(now(name)).values.clone().to(device).requires_grad_() for name in OUTPUTS}
        columns = ViewColumns()
        for name in batch.columns:
            column = batch[name]
            if name not in map(now, OUTPUTS):
                columns[name] = (column.values if isinstance(column, Ragged) else column).clone().to(device)
        row = torch.repeat_interleave(torch.arange(len(batch)), offsets.diff()).to(device)
        return TokenView(outputs, columns, row, len(batch))

    def call(self, view: TokenView) -> LossValue:
        """Return the loss of a view."""
        value: LossValue = resolve(self.record.function)(view, **self.given.arguments)
        return value

    def totals(self, parts: Sequence[Batch], device: str = "cpu") -> LossTotals:
        """Sum the loss over micro-batches, as an engine does."""
        total, weight, metrics, gradients = 0.0, 0.0, [], []
        for part in parts:
            view = self.view(part, device)
            value = self.call(view)
            total, weight = total + value.total.item(), weight + value.weight
            metrics.append(value.metrics)
            gradients.append(self.gradient(view, value))
        return LossTotals(total, weight, metric_values(merge_metrics(metrics)), torch.cat(gradients))

    def gradient(self, view: TokenView, value: LossValue) -> torch.Tensor:
        """Return the gradient of the total with respect to the output that the loss depends on."""
        output = view.outputs[self.record.output]
        if not value.total.requires_grad:
            return torch.zeros(output.shape)
        (gradient,) = torch.autograd.grad(value.total, output, allow_unused=True)
        return torch.zeros(output.shape) if gradient is None else gradient.cpu()


class Stopped(TorchFunctionMode):
    """Fixes the values that a loss excludes from its gradient: values that it detaches or computes under `no_grad`.

    It records the values in the first call, and replays them in a call within `held`. The difference of the two losses
    then shows only what the gradient is meant to follow.
    """

    def __init__(self) -> None:
        super().__init__()
        self._recorded: list[tuple[Any, Any]] = []
        self._replayed: Iterator[tuple[Any, Any]] | None = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Replay the values of the first call within this context."""
        self._replayed = iter(self._recorded)
        with self:
            yield

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record or replay a call. Implements `TorchFunctionMode`."""
        switches = getattr(function, "__name__", "") == "_set_grad_enabled"  # `no_grad` itself
        stops = function in DETACHING or not (switches or torch.is_grad_enabled())
        if not stops or self._replayed is None:
            value = function(*args, **(kwargs or {}))
            if stops:
                self._recorded.append((function, _copy(value)))
            return value
        recorded, value = next(self._replayed, (None, None))
        if recorded != function:  # wrappers of a property are new objects each time
            raise OtherWay
        return _copy(value)


class OtherWay(Exception):
    """Error: the loss calls other torch functions than in its first call."""


DETACHING = (torch.Tensor.detach, torch.detach, torch.Tensor.data.__get__)  # type: ignore[attr-defined]


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def problems_of(value: Any) -> list[str]:
    """Return the problems with the types, shapes and numbers of a loss's return value."""
    if not isinstance(value, LossValue):
        return [f"it returned {type(value).__name__}, not a LossValue"]
    if not isinstance(value.total, torch.Tensor) or value.total.shape != ():
        shape = (
            f"of shape {tuple(value.total.shape)}"
            if isinstance(value.total, torch.Tensor)
            else type(value.total).__name__
        )
        return [f"the total is {shape}, not a scalar tensor"]
    problems = []
    if not math.isfinite(value.total.item()):
        problems.append(f"the total is {value.total.item()}")
    if isinstance(value.weight, torch.Tensor) or not math.isfinite(value.weight) or value.weight < 0:
        problems.append(f"the weight must be a finite number of at least 0, not {value.weight!r}")
    for name, metric in value.metrics.items():
        if not isinstance(metric, Mean | Max):
            problems.append(f"metric {name!r} is {type(metric).__name__}, neither a Mean nor a Max")
        elif not math.isfinite(metric.value):
            problems.append(f"metric {name!r} is {metric.value}")
    return problems
