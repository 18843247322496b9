"""Checks that weights are finite: when they are read, and after each step that changes them.

After a step, finite means that a tensor's norm is a finite float32. A weight whose square exceeds float32 (above
1.8e19) is as lost as infinity, because nothing can be computed with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from enginehouse.engines.train import Metrics, NonFiniteWeights
from enginehouse.errors import ModelError
from enginehouse_torch.modeling.ranks import gather

__all__ = ["check_step", "check_stored"]

NAMED = 3
"""Maximum number of parameters that a message names."""


def are_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Return True if each tensor's norm is finite, in one pass over them; waits for the device."""
    if not tensors:
        return True
    return bool(torch.stack(torch._foreach_norm(list(tensors))).isfinite().all())


def find_not_finite(named: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of the tensors whose norm is not finite."""
    return [name for name, tensor in named.items() if not are_finite([tensor])]


def lost_weights_error(names: Iterable[str], step: int, figures: Metrics) -> NonFiniteWeights:
    """Return the error for optimizer step `step`, from 1, with metrics `figures`, that made weights not finite."""
    return NonFiniteWeights(
        f"optimizer step {step} left weights that are not finite: {_join(list(dict.fromkeys(names)))}. The step's lr "
        f"was {figures['lr']:.3g}, the gradient's norm {figures['grad_norm']:.3g} before clipping. These weights are "
        "neither served nor saved. Try a smaller lr, more warmup_steps or a smaller max_grad_norm; lr times "
        "weight_decay must be far below 1"
    )


def check_step(
    own: Sequence[torch.Tensor], named: Callable[[], Mapping[str, torch.Tensor]], step: int, figures: Metrics
) -> None:
    """Check that an optimizer step left finite weights, for engines whose ranks hold different parts; collective.

    Args:
        own: this rank's part of each trained parameter.
        named: returns the parts by name; called if a part is not finite.
        step: number of the optimizer step, from 1.
        figures: metrics of the step, `lr` and `grad_norm` among them.

    Raises:
        NonFiniteWeights: raised on every rank if any rank has a weight that is not finite.
    """
    lost = torch.tensor(0.0 if are_finite(own) else 1.0)
    several = dist.is_initialized() and dist.get_world_size() > 1
    if several:
        dist.all_reduce(lost, op=dist.ReduceOp.MAX)
    if not lost:
        return
    lost_names = find_not_finite(named())
    names: list[list[str]] = gather(lost_names) if several else [lost_names]
    raise lost_weights_error((name for of_rank in names for name in of_rank), step, figures)


def check_stored(path: str | Path, named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Check that weights read from files are finite.

    Args:
        path: the model's directory.
        named: this rank's part of each weight, by its name in the checkpoint.

    Raises:
        ModelError: a weight is not finite; the message names it and its file.
    """
    bad = [name for name, tensor in named if tensor.is_floating_point() and not _is_number(tensor)]
    if bad:
        raise ModelError(
            f"the model's weights are not finite (NaN or infinite): {_join(bad)} in {_find_file(Path(path), bad[0])}. "
            "The run that wrote them diverged, or the file is damaged: use an earlier model, or download it again"
        )


def _is_number(tensor: torch.Tensor) -> bool:
    if not tensor.numel():
        return True
    least, most = torch.aminmax(tensor)  # either is NaN if any element is
    return math.isfinite(least.item()) and math.isfinite(most.item())


def _join(names: Sequence[str]) -> str:
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")


def _find_file(path: Path, name: str) -> Path:
    """Return the file of a model directory that holds a tensor, or the directory if none does."""
    from safetensors import safe_open

    for file in sorted(path.glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as tensors:
            if name in tensors.keys():  # noqa: SIM118 (safe_open has keys() only)
                return file
    return path
