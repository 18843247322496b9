"""Made-up weights for transport tests: every dtype, empty tensors, scalars, and their metadata."""

import math

import torch

from enginehouse.engines.weights import DTYPE_BYTES, ParamMeta

DTYPES = tuple(DTYPE_BYTES)


def random_tensor(shape: tuple[int, ...], dtype: str, generator: torch.Generator) -> torch.Tensor:
    """A tensor of random bytes (NaNs and all), of any dtype."""
    nbytes = math.prod(shape) * DTYPE_BYTES[dtype]
    high = 2 if dtype == "bool" else 256
    flat = torch.randint(0, high, (nbytes,), dtype=torch.uint8, generator=generator)
    return flat.view(getattr(torch, dtype)).reshape(shape)


def random_weights(shapes: list[tuple[tuple[int, ...], str]], seed: int) -> dict[str, torch.Tensor]:
    """Weights of the given shapes and dtypes."""
    generator = torch.Generator().manual_seed(seed)
    return {f"p{i}": random_tensor(shape, dtype, generator) for i, (shape, dtype) in enumerate(shapes)}


def metadata(weights: dict[str, torch.Tensor]) -> list[ParamMeta]:
    """What a training engine would announce for `weights`."""
    return [ParamMeta.of(name, t) for name, t in weights.items()]


def bytes_of(weights: dict[str, torch.Tensor]) -> dict[str, bytes]:
    """The exact bytes of each tensor; NaNs compare by their bits."""
    return {name: t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for name, t in weights.items()}


MODEL: list[tuple[tuple[int, ...], str]] = [
    ((64, 32), "float32"),
    ((), "float32"),
    ((0, 7), "bfloat16"),
    ((33,), "bfloat16"),
    ((5, 3), "float16"),
    ((1000,), "float64"),
    ((17,), "int8"),
    ((3,), "bool"),
    ((9, 2), "float8_e4m3fn"),
]
"""A few parameters of odd sizes."""
