"""In place of triton, which compiles kernels for GPUs: what modules of SGLang call while they are imported.

A kernel can be defined, not launched. SGLang imports it in about 200 modules (`sglang/kernels/ops/`,
`sglang/srt/layers/`), also for the two functions of arithmetic below.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from enginehouse_sglang.on_cpu import NotOnCPU


class Kernel:
    """A function under `@triton.jit`: it cannot be launched, nor called."""

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
    """`triton.jit`, with options or without."""
    return Kernel if function is None else Kernel(function)


def decorator(*_arguments: Any, **_options: Any) -> Callable[[Any], Any]:
    """`triton.autotune` and `triton.heuristics`, which add to a kernel how it is to be launched."""
    return lambda kernel: kernel


class Config:
    """`triton.Config`, an argument of `triton.autotune`."""

    def __init__(self, *_arguments: Any, **_options: Any):
        pass


class constexpr:
    """`triton.language.constexpr`: an annotation in kernels, and a constant beside them."""

    def __init__(self, value: Any):
        self.value = value


def cdiv(number: int, by: int) -> int:
    """The quotient rounded up."""
    return -(number // -by)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is not below a number."""
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
"""What the package has beside stand-ins."""

NAMES_UNDER: dict[str, dict[str, Any]] = {"language": {"constexpr": constexpr}}
"""The same of its modules."""
