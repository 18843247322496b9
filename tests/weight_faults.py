"""Faults inside an engine's process, for fault injection only: what its model holds is changed right after a load.

The file that the environment variable `WEIGHT_FAULT` names says which fault comes next. It is emptied by the process
that applies the fault, so that the old version comes back without one.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from enginehouse.weights.read_back import ReadBack


def one_bit(held: torch.Tensor) -> None:
    """The lowest bit of one number: 1e-7 of it."""
    held.view(torch.int32).view(-1)[7] ^= 1


def swapped(held: torch.Tensor) -> None:
    """The first two of what is counted along the first dimension: rows, or experts."""
    held[[0, 1]] = held[[1, 0]]


FAULTS: dict[str, tuple[str, Callable[[torch.Tensor], None]]] = {
    "one bit of a norm": ("model.layers.1.input_layernorm.weight", one_bit),
    "the sign of the last norm": ("model.norm.weight", torch.Tensor.neg_),
    "two rows of the queries": ("model.layers.0.self_attn.qkv_proj.weight", swapped),
    "two experts": ("model.layers.1.mlp.experts.w2_weight", swapped),
}
"""What is changed in a model of vLLM or SGLang, by its own name, and how."""


def change(model: torch.nn.Module) -> None:
    """Apply the fault that is to come next, if there is one."""
    file = Path(os.environ["WEIGHT_FAULT"])
    if fault := file.read_text():
        file.write_text("")
        name, spoil = FAULTS[fault]
        spoil(dict(model.named_parameters())[name].data)


def install(_worker: Any = None) -> None:
    """Have faults applied in this process, between a load and the comparison."""
    compare = ReadBack.compare

    def spoilt(self: ReadBack, model: torch.nn.Module, *args: Any) -> Any:
        change(model)
        return compare(self, model, *args)

    patch.object(ReadBack, "compare", spoilt).start()


LOADER = f"{__name__}.load"


def load(model: Any, named_tensors: Any) -> None:
    """SGLang's loader, with faults."""
    from enginehouse_sglang import loader

    if ReadBack.compare.__name__ != "spoilt":
        install()
    loader.load(model, named_tensors)
