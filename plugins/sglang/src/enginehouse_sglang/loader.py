"""Loads a staged version inside SGLang's processes: the `custom_weight_loader` of a server that a worker started.

SGLang calls `load` in each process of the model with what the worker sent by `/update_weights_from_tensor`: not the
weights, but where in this host's memory they lie. It does not raise, since that would end the process; what came of it
stands in the reports.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from enginehouse.engines.weights import WeightSyncError
from enginehouse.errors import listed
from enginehouse.weights.reports import Reporter
from enginehouse.weights.staged_source import StagedSource

MARKS = 4096
"""Elements of a parameter that are marked, at most: several in each of what SGLang puts together in one, heads of
queries, keys and values, or a layer's experts."""

MARKED = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of the parameters that are."""

NOT_SENT = (".k_scale", ".v_scale")
"""How parameters end that a checkpoint need not hold."""

LOADER = f"{__name__}.load"
"""SGLang's name for it, as `--custom-weight-loader` and as `load_format`."""


def order(source: dict[str, Any], reports: str) -> list[tuple[str, torch.Tensor]]:
    """What is sent to SGLang in the place of tensors.

    Args:
        source: that of `Version.source`, or `{"directory": PATH}`.
        reports: path of the `Reports`.
    """
    text = json.dumps({**source, "reports": reports}).encode()
    return [("enginehouse", torch.frombuffer(bytearray(text), dtype=torch.uint8))]


def load(model: Any, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """See that every parameter is there as it was staged, and only then load them all."""
    told = json.loads(bytes(named_tensors[0][1].cpu().tolist()))
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    Reporter(told["reports"], rank).of(lambda: _load(model, told))


def _load(model: Any, told: dict[str, Any]) -> None:
    source = StagedSource(told.get("parameters", ()), told.get("directory", ""))
    source.check()
    missing = unfilled(model, lambda: model.load_weights(iter(source)))
    if missing:
        raise WeightSyncError(f"nothing that was sent fills {listed(missing)} of sglang's model", missing)
    source.close()


@torch.no_grad()
def unfilled(model: torch.nn.Module, load: Callable[[], Any]) -> list[str]:
    """Load, and see which parameters did not get all their elements, by SGLang's names for them.

    SGLang's models skip a name that they do not know, at most with a log line, and say nothing of what they lack. So
    some elements of each parameter, all over it, are marked before: NaN, which no weight is. Where a mark is left the
    old value is put back.

    Not looked at: scales of quantized keys and values, which need not be in a checkpoint, and parameters of 8 bits or
    of integers.
    """
    marks: list[tuple[str, tuple[torch.Tensor, ...], torch.Tensor]] = []
    for name, parameter in model.named_parameters():
        if parameter.dtype in MARKED and parameter.numel() and not name.endswith(NOT_SENT):
            count = min(MARKS, parameter.numel())
            flat = torch.linspace(0, parameter.numel() - 1, count, device=parameter.device, dtype=torch.float64).long()
            places = torch.unravel_index(flat, parameter.shape)
            marks.append((name, places, parameter.data[places].clone()))
            parameter.data[places] = float("nan")
    missing = []
    try:
        load()
    finally:
        now = dict(model.named_parameters())
        for name, places, before in marks:
            data = now[name].data
            left = data[places].isnan()
            if left.any():
                data[tuple(place[left] for place in places)] = before[left]
                missing.append(name)
    return missing
