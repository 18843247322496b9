"""Measures the difference of two results as one number, and finds the place where it is largest."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch

from enginehouse_testing.check import Measured, wrong

Tensors = Mapping[str, torch.Tensor]


def mismatch(tensors: Tensors, right: Tensors) -> str:
    """Describe how names or shapes differ; empty if they are equal."""
    if missing := sorted(right.keys() - tensors.keys()):
        return f"missing: {', '.join(missing)}"
    if extra := sorted(tensors.keys() - right.keys()):
        return f"unexpected: {', '.join(extra)}"
    return "; ".join(
        f"{name} has shape {tuple(tensors[name].shape)}, not {tuple(tensor.shape)}"
        for name, tensor in right.items()
        if tensors[name].shape != tensor.shape
    )


def largest_difference(tensors: Tensors, right: Tensors) -> Measured:
    """Return the largest difference between elements of `tensors` and `right`, the expected tensors.

    The differences in a tensor are divided by its largest expected magnitude if this exceeds 1.
    """
    if difference := mismatch(tensors, right):
        return wrong(difference)
    worst = Measured(0.0)
    for name, tensor in right.items():
        if tensor.numel():
            scale = max(1.0, float(tensor.abs().max()))
            worst = larger(worst, Measured(float((tensors[name] - tensor).abs().max()) / scale, f"largest in {name}"))
    return worst


def relative_to_norm(tensors: Tensors, right: Tensors) -> Measured:
    """Return the norm of all differences, divided by the norm of `right`, the expected tensors."""
    if difference := mismatch(tensors, right):
        return wrong(difference)
    squares = {name: float((tensors[name] - tensor).double().square().sum()) for name, tensor in right.items()}
    whole = sum(float(tensor.double().square().sum()) for tensor in right.values())
    most = max(squares, key=lambda name: squares[name])
    return Measured((sum(squares.values()) / whole) ** 0.5, f"most of it in {most}")


def same_bits(tensors: Tensors, right: Tensors, what: str) -> Measured:
    """Return the number of tensors that differ in at least one bit."""
    if difference := mismatch(tensors, right):
        return wrong(f"{what}: {difference}")
    differing = [
        name for name, t in right.items() if tensors[name].dtype != t.dtype or not torch.equal(tensors[name], t)
    ]
    return Measured(float(len(differing)), f"{what}: these differ: {', '.join(differing)}" if differing else "")


def relative(number: float, right: float, what: str) -> Measured:
    """Return the relative difference of two numbers."""
    return Measured(abs(number - right) / max(abs(right), 1e-12), f"{what} is {number:.8g}, not {right:.8g}")


def larger(*measured: Measured) -> Measured:
    """Return the result with the largest error. Several results without a finite error become one with all details."""
    sizeless = [result.detail for result in measured if not math.isfinite(result.error)]
    if len(sizeless) > 1:
        return wrong("; ".join(dict.fromkeys(filter(None, sizeless))))
    return max(measured, key=lambda result: math.inf if math.isnan(result.error) else result.error)


def located(measured: Measured, where: str) -> Measured:
    """Return a result whose detail also says where it was measured."""
    return replace(measured, detail=f"{measured.detail}{where}")
