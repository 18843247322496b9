"""Rotary positions whose frequencies follow the longest row of a pass, computed for each row as if it stood alone.

Of transformers' kinds, `dynamic` and `longrope` take their frequencies by the largest position of a call, `dynamic` by
that of earlier calls, too. So a row would score otherwise beside a longer one. Here each row's cosines and sines are
what the module itself gives for a row of that length, whatever stands beside it.
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
"""By model: its modules that are meant here, once they were looked for."""


def find_length_dependent(model: torch.nn.Module) -> list[torch.nn.Module]:
    """List a model's rotary modules whose frequencies depend on how long a row is."""
    if model not in _length_dependent:
        _length_dependent[model] = [module for module in model.modules() if _kinds(module) & {"dynamic", "longrope"}]
    return _length_dependent[model]


def _kinds(module: torch.nn.Module) -> set[str]:
    kind = getattr(module, "rope_type", None)
    kinds = kind.values() if isinstance(kind, dict) else [kind]
    return {"dynamic" if "dynamic" in kind else kind for kind in kinds if isinstance(kind, str)}


@contextmanager
def compute_rows_alone(model: torch.nn.Module, given: ModelInput) -> Iterator[None]:
    """Within, each row of `given` has the frequencies that it has alone."""
    modules = find_length_dependent(model) if given.rows is not None else []
    try:
        for module in modules:
            module.forward = functools.partial(_compute_each_row, module, given)
        yield
    finally:
        for module in modules:
            del module.forward  # its class's is there again


def _compute_each_row(
    module: torch.nn.Module, given: ModelInput, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Return what a rotary module gives, row by row: of rows below one another, or behind one another.

    Args:
        module: stands for its own `forward`.
        given: what the model is run on.
        x: names the dtype and the device.
        position_ids: not looked at: rows that share no prompt count from 0.
        args: handed on; `kwargs` too.
    """
    run = type(module).forward
    if x.shape[:2] != given.ids.shape or given.rows is None:
        return run(module, x, position_ids, *args, **kwargs)
    behind = len(given.rows) > 1 and x.shape[0] == 1
    tables: dict[tuple[int, int], tuple[torch.Tensor, ...]] = {}
    parts = []
    for whole, tokens in given.rows:
        key = (whole, tokens if behind else x.shape[1])
        if key not in tables:
            tables[key] = _compute_row(module, x, *key, *args, **kwargs)
        parts.append(tables[key])
    joined = tuple(torch.cat(part, dim=1 if behind else 0) for part in zip(*parts, strict=True))
    return joined if len(joined) > 1 else joined[0]


def _compute_row(
    module: torch.nn.Module, x: torch.Tensor, whole: int, tokens: int, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, ...]:
    """Return what the module gives for the first `tokens` positions of a row of `whole` that stands alone."""
    _forget_earlier_rows(module)
    positions = torch.arange(tokens, device=x.device).clamp_(max=whole - 1)
    last = torch.full((1,), whole - 1, device=x.device)  # the module looks at the largest
    found = type(module).forward(module, x, torch.cat([positions, last])[None], *args, **kwargs)
    return tuple(part[:, :-1] for part in (found if isinstance(found, tuple) else (found,)))


def _forget_earlier_rows(module: torch.nn.Module) -> None:
    """Give a `dynamic` module the frequencies back that it had at first, each kind of layer its own."""
    end = "original_inv_freq"
    for name in [name for name in (*module._buffers, *vars(module)) if name.endswith(end)]:
        prefix, original = name.removesuffix(end), getattr(module, name)
        module.register_buffer(f"{prefix}inv_freq", original.clone(), persistent=False)
        if hasattr(module, f"{prefix}max_seq_len_cached"):
            setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)
