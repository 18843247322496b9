"""A loss under test: called as an engine calls it, on made-up samples."""

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
from enginehouse_testing.given import Given
from enginehouse_testing.samples import OUTPUTS, now, samples


class Columns(dict[str, torch.Tensor]):
    """Columns of a view; one that is not there is asked for by name."""

    def __missing__(self, name: str) -> torch.Tensor:
        raise UnknownColumnError(
            f"the suite's samples have no column {name!r}, {nearest(name, self)}; if another part of the algorithm "
            f'adds it, name it: columns = {{{name!r}: "row"}}, or "token"'
        )


@dataclass(frozen=True, slots=True)
class Found:
    """What a loss made of micro-batches together.

    Attributes:
        total: the sum of their totals.
        weight: the sum of their weights.
        metrics: as they would be logged.
        gradient: of the total by the output that the loss is of, `(tokens,)`, 0 where there is none.
    """

    total: float
    weight: float
    metrics: Mapping[str, float]
    gradient: torch.Tensor

    def apart(self, other: Found) -> tuple[float, str]:
        """The largest difference of any number, relative to the largest of its kind where that exceeds 1; and where."""
        pairs = {
            "the total": (self.total, other.total),
            "the weight": (self.weight, other.weight),
            **{
                f"metric {name!r}": (self.metrics.get(name), other.metrics.get(name))
                for name in {**self.metrics, **other.metrics}
            },
        }
        found = [(_apart(*pair), f"{what} is {pair[0]}, not {pair[1]}") for what, pair in pairs.items()]
        scale = max(1.0, float(other.gradient.abs().max()))
        gradient = float((self.gradient - other.gradient).abs().max()) / scale
        found.append((gradient, f"the gradient of a token differs by {gradient * scale:.3g}"))
        return max(found, key=lambda one: math.inf if math.isnan(one[0]) else one[0])


def _apart(one: float | None, other: float | None) -> float:
    if one is None or other is None:
        return math.inf
    return abs(one - other) / max(1.0, abs(other))


@dataclass(frozen=True, slots=True)
class LossTrial:
    """What an act is given.

    Attributes:
        record: the loss.
        given: its arguments, and further columns.
    """

    record: Loss
    given: Given

    def samples(self) -> Batch:
        """Samples of which every row has tokens that count."""
        return samples(self.given.columns)

    def view(self, batch: Batch, device: str = "cpu") -> TokenView:
        """The view of a micro-batch, with memory of its own; its outputs are leaves that take a gradient."""
        offsets = batch.ragged("input_ids").offsets
        outputs = {name: batch.ragged(now(name)).values.clone().to(device).requires_grad_() for name in OUTPUTS}
        columns = Columns()
        for name in batch.columns:
            column = batch[name]
            if name not in map(now, OUTPUTS):
                columns[name] = (column.values if isinstance(column, Ragged) else column).clone().to(device)
        row = torch.repeat_interleave(torch.arange(len(batch)), offsets.diff()).to(device)
        return TokenView(outputs, columns, row, len(batch))

    def call(self, view: TokenView) -> LossValue:
        """The loss of a view."""
        made: LossValue = resolve(self.record.function)(view, **self.given.arguments)
        return made

    def of(self, parts: Sequence[Batch], device: str = "cpu") -> Found:
        """What the loss makes of micro-batches, added up as an engine does."""
        total, weight, metrics, gradients = 0.0, 0.0, [], []
        for part in parts:
            view = self.view(part, device)
            value = self.call(view)
            total, weight = total + value.total.item(), weight + value.weight
            metrics.append(value.metrics)
            gradients.append(self.gradient(view, value))
        return Found(total, weight, metric_values(merge_metrics(metrics)), torch.cat(gradients))

    def gradient(self, view: TokenView, value: LossValue) -> torch.Tensor:
        """Of the total by the output that the loss is of."""
        output = view.outputs[self.record.output]
        if not value.total.requires_grad:
            return torch.zeros(output.shape)
        (gradient,) = torch.autograd.grad(value.total, output, allow_unused=True)
        return torch.zeros(output.shape) if gradient is None else gradient.cpu()


class Stopped(TorchFunctionMode):
    """Holds fast what a loss takes out of its gradient: what it detaches, and what it computes under `no_grad`.

    Its first call is recorded. In a call within `held` each of these has the value it had then, so that a difference of
    two losses shows what the gradient is meant to follow, and nothing else.
    """

    def __init__(self) -> None:
        super().__init__()
        self._recorded: list[tuple[Any, Any]] = []
        self._replayed: Iterator[tuple[Any, Any]] | None = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Within this, values of the first call stand."""
        self._replayed = iter(self._recorded)
        with self:
            yield

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See torch."""
        switches = getattr(function, "__name__", "") == "_set_grad_enabled"  # `no_grad` itself
        stops = function in DETACHING or not (switches or torch.is_grad_enabled())
        if not stops or self._replayed is None:
            value = function(*args, **(kwargs or {}))
            if stops:
                self._recorded.append((function, _copy(value)))
            return value
        recorded, value = next(self._replayed, (None, None))
        if recorded != function:  # wrappers of a property are made anew each time
            raise OtherWay
        return _copy(value)


class OtherWay(Exception):
    """A loss that did other things than at its first call."""


DETACHING = (torch.Tensor.detach, torch.detach, torch.Tensor.data.__get__)  # type: ignore[attr-defined]


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def problems_of(value: Any) -> list[str]:
    """What is wrong with what a loss returned, whatever it computes."""
    if not isinstance(value, LossValue):
        return [f"it returned {type(value).__name__}, not a LossValue"]
    if not isinstance(value.total, torch.Tensor) or value.total.shape != ():
        shape = (
            f"of shape {tuple(value.total.shape)}"
            if isinstance(value.total, torch.Tensor)
            else type(value.total).__name__
        )
        return [f"the total is {shape}, not a scalar tensor"]
    found = []
    if not math.isfinite(value.total.item()):
        found.append(f"the total is {value.total.item()}")
    if isinstance(value.weight, torch.Tensor) or not math.isfinite(value.weight) or value.weight < 0:
        found.append(f"the weight is {value.weight!r}, not a number that is finite and 0 or more")
    for name, one in value.metrics.items():
        if not isinstance(one, Mean | Max):
            found.append(f"metric {name!r} is {type(one).__name__}, neither a Mean nor a Max")
        elif not math.isfinite(one.value):
            found.append(f"metric {name!r} is {one.value}")
    return found
