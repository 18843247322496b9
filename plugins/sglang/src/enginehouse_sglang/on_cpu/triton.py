"""Stands in for triton, which compiles kernels for GPUs: has what modules of SGLang call while they are imported.

A kernel can be defined, but not launched. About 200 modules of SGLang (`sglang/kernels/ops/`, `sglang/srt/layers/`)
import triton, also for the two arithmetic functions below.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from enginehouse_sglang.on_cpu import NotOnCPU


class Kernel:
    """A function under `@triton.jit`, which can be neither launched nor called."""

    def __init__(self, function: Callable[..., Any]):
        self.fn = function
        functools.update_wrapper(self, function)

    def __getitem__(self, grid: Any) -> Any:
        raise NotOnCPU(self._name)

    def __call__(self, *_arguments: Any, **_named: Any) -> Any:
        raise NotOnCPU(self._name)

    @property
    def _name(self) -> str:
        return f"triton kernel {self.fn.__module__}.{self.fn.__qualname__}"


def jit(function: Callable[..., Any] | None = None, **_options: Any) -> Any:
    """Stand in for `triton.jit`, with options or without."""
    return Kernel if function is None else Kernel(function)


def decorator(*_arguments: Any, **_options: Any) -> Callable[[Any], Any]:
    """Stand in for `triton.autotune` and `triton.heuristics`, which say how to launch a kernel."""
    return lambda kernel: kernel


class Config:
    """Stands in for `triton.Config`, an argument of `triton.autotune`."""

    def __init__(self, *_arguments: Any, **_options: Any):
        pass


class constexpr:
    """Stands in for `triton.language.constexpr`, an annotation in kernels and a constant outside them."""

    def __init__(self, value: Any):
        self.value = value


def cdiv(number: int, by: int) -> int:
    """Return the quotient rounded up."""
    return -(number // -by)


def next_power_of_2(number: int) -> int:
    """Return the smallest power of two that is not below a number."""
    return 1 << (number - 1).bit_length()


NAMES: dict[str, Any] = {
    "__version__": "3.0.0",
    "jit": jit,
    "autotune": decorator,
    "heuristics": decorator,
    "Config": Config,
    "cdiv": cdiv,
    "next_power_of_2": next_power_of_2,
}
"""Names that the package has in addition to stand-ins."""

NAMES_UNDER: dict[str, dict[str, Any]] = {"language": {"constexpr": constexpr}}
"""Names that its modules have in addition to stand-ins."""
