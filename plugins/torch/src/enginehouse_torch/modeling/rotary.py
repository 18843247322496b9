"""Rotary positions whose frequencies depend on the longest row of a pass, computed for each row as if it were alone.

In transformers `dynamic` and `longrope` take their frequencies from the largest position of a call, `dynamic` from
earlier calls too, so a row would score differently beside a longer row. Here each row gets the cosines and sines that
the module itself returns for a row of that length.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from enginehouse_torch.modeling.heads import ModelInput

_length_dependent: weakref.WeakKeyDictionary[torch.nn.Module, list[torch.nn.Module]] = weakref.WeakKeyDictionary()
"""Cached results of `find_length_dependent`."""


def find_length_dependent(model: torch.nn.Module) -> list[torch.nn.Module]:
    """List a model's rotary modules whose frequencies depend on the length of a row."""
    if model not in _length_dependent:
        _length_dependent[model] = [module for module in model.modules() if _kinds(module) & {"dynamic", "longrope"}]
    return _length_dependent[model]


def _kinds(module: torch.nn.Module) -> set[str]:
    kind = getattr(module, "rope_type", None)
    kinds = kind.values() if isinstance(kind, dict) else [kind]
    return {"dynamic" if "dynamic" in kind else kind for kind in kinds if isinstance(kind, str)}


@contextmanager
def compute_rows_alone(model: torch.nn.Module, inputs: ModelInput) -> Iterator[None]:
    """Give each row of `inputs` the frequencies that it would have without other rows, within the block."""
    modules = find_length_dependent(model) if inputs.rows is not None else []
    try:
        for module in modules:
            module.forward = functools.partial(_compute_each_row, module, inputs)
        yield
    finally:
        for module in modules:
            del module.forward  # the class's forward is used again


def _compute_each_row(
    module: torch.nn.Module, inputs: ModelInput, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Return the rotary module's output row by row, for stacked or for packed rows, in place of the module's `forward`.

    `x` gives dtype and device; `position_ids` are ignored, because rows that share no prompt count from 0.
    """
    run = type(module).forward
    if x.shape[:2] != inputs.ids.shape or inputs.rows is None:
        return run(module, x, position_ids, *args, **kwargs)
    behind = len(inputs.rows) > 1 and x.shape[0] == 1
    tables: dict[tuple[int, int], tuple[torch.Tensor, ...]] = {}
    parts = []
    for whole, tokens in inputs.rows:
        key = (whole, tokens if behind else x.shape[1])
        if key not in tables:
            tables[key] = _compute_row(module, x, *key, *args, **kwargs)
        parts.append(tables[key])
    joined = tuple(torch.cat(part, dim=1 if behind else 0) for part in zip(*parts, strict=True))
    return joined if len(joined) > 1 else joined[0]


def _compute_row(
    module: torch.nn.Module, x: torch.Tensor, whole: int, tokens: int, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, ...]:
    """Return the module's output for the first `tokens` positions of a separate row of `whole` tokens."""
    _forget_earlier_rows(module)
    positions = torch.arange(tokens, device=x.device).clamp_(max=whole - 1)
    last = torch.full((1,), whole - 1, device=x.device)  # the module uses the largest position
    output = type(module).forward(module, x, torch.cat([positions, last])[None], *args, **kwargs)
    return tuple(part[:, :-1] for part in (output if isinstance(output, tuple) else (output,)))


def _forget_earlier_rows(module: torch.nn.Module) -> None:
    """Restore the original frequencies of a `dynamic` module, for each kind of layer."""
    suffix = "original_inv_freq"
    for name in [name for name in (*module._buffers, *vars(module)) if name.endswith(suffix)]:
        prefix, original = name.removesuffix(suffix), getattr(module, name)
        module.register_buffer(f"{prefix}inv_freq", original.clone(), persistent=False)
        if hasattr(module, f"{prefix}max_seq_len_cached"):
            setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)
