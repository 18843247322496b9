"""How far two results lie apart, as one number and the place where it is largest."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from enginehouse_testing.check import Measured

Tensors = Mapping[str, torch.Tensor]


def mismatch(found: Tensors, right: Tensors) -> str:
    """In words, how names or shapes differ; empty where they do not."""
    if missing := sorted(right.keys() - found.keys()):
        return f"missing: {', '.join(missing)}"
    if extra := sorted(found.keys() - right.keys()):
        return f"there should not be: {', '.join(extra)}"
    return "; ".join(
        f"{name} has shape {tuple(found[name].shape)}, not {tuple(tensor.shape)}"
        for name, tensor in right.items()
        if found[name].shape != tensor.shape
    )


def largest_difference(found: Tensors, right: Tensors) -> Measured:
    """The largest difference of any element, divided by the largest value of the right result where that exceeds 1."""
    if said := mismatch(found, right):
        return Measured(float("inf"), said)
    worst = Measured(0.0)
    for name, tensor in right.items():
        if tensor.numel():
            scale = max(1.0, float(tensor.abs().max()))
            worst = larger(worst, Measured(float((found[name] - tensor).abs().max()) / scale, f"largest in {name}"))
    return worst


def relative_to_norm(found: Tensors, right: Tensors) -> Measured:
    """The norm of all differences, divided by the norm of the right result."""
    if said := mismatch(found, right):
        return Measured(float("inf"), said)
    apart = {name: float((found[name] - tensor).double().square().sum()) for name, tensor in right.items()}
    whole = sum(float(tensor.double().square().sum()) for tensor in right.values())
    most = max(apart, key=lambda name: apart[name])
    return Measured((sum(apart.values()) / whole) ** 0.5, f"most of it in {most}")


def same_bits(found: Tensors, right: Tensors, what: str) -> Measured:
    """0, or the number of tensors that differ in a bit."""
    if said := mismatch(found, right):
        return Measured(float("inf"), f"{what}: {said}")
    wrong = [name for name, tensor in right.items() if not _equal(found[name], tensor)]
    return Measured(float(len(wrong)), f"{what}: these differ: {', '.join(wrong)}" if wrong else "")


def relative(found: float, right: float, what: str) -> Measured:
    """Two numbers."""
    return Measured(abs(found - right) / max(abs(right), 1e-12), f"{what} is {found:.8g}, not {right:.8g}")


def larger(*measured: Measured) -> Measured:
    """The one with the largest error; where several have none that is a number, all of them in one."""
    sizeless = [one.detail for one in measured if not math.isfinite(one.error)]
    if len(sizeless) > 1:
        return Measured(float("inf"), "; ".join(dict.fromkeys(filter(None, sizeless))))
    return max(measured, key=lambda one: float("inf") if one.error != one.error else one.error)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)
