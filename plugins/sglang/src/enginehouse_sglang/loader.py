"""Loads a staged version inside SGLang's processes: the `custom_weight_loader` of a server that a worker started.

SGLang calls `load` in each process of the model with what the worker sent by `/update_weights_from_tensor`: not the
weights, but their place in this host's memory. `load` does not raise, because that would end the process; it writes
the outcome to the reports.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch

from enginehouse.engines.weights import WeightSyncError
from enginehouse.errors import listed
from enginehouse.weights.read_back import ReadBack
from enginehouse.weights.reports import Reporter
from enginehouse.weights.staged_source import StagedSource

MARKS = 4096
"""Maximum number of elements of a parameter that `find_unfilled` marks with NaN. There are several for each tensor that
SGLang joins in the parameter, such as heads of queries, keys and values, or a layer's experts."""

MARKED = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of the parameters that `find_unfilled` checks."""

NOT_SENT = (".k_scale", ".v_scale")
"""Endings of parameters that a checkpoint need not hold."""

READ_BACKS: WeakKeyDictionary[torch.nn.Module, ReadBack] = WeakKeyDictionary()
"""By model; a process has one, and a second one if it drafts."""

LOADER = f"{__name__}.load"
"""SGLang's name for `load`, as `--custom-weight-loader` and as `load_format`."""


def build_order(source: dict[str, Any], reports: str) -> list[tuple[str, torch.Tensor]]:
    """Return the message that is sent to SGLang instead of tensors.

    Args:
        source: `Version.source`, or `{"directory": PATH}`.
        reports: Path of the `Reports`.
    """
    text = json.dumps({**source, "reports": reports}).encode()
    return [("enginehouse", torch.frombuffer(bytearray(text), dtype=torch.uint8))]


def load(model: Any, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Check that memory holds every parameter as it was staged, and only then load them all."""
    order = json.loads(bytes(named_tensors[0][1].cpu().tolist()))
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    Reporter(order["reports"], rank).run(lambda: _load(model, order))


def _load(model: Any, order: dict[str, Any]) -> list[tuple[int, str]] | None:
    source = StagedSource(order.get("parameters", ()), order.get("directory", ""))
    source.check()
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # a pause in place leaves the last pass running
    read_back = READ_BACKS.setdefault(model, ReadBack())

    def fill() -> None:
        with read_back.watch():
            model.load_weights(read_back.follow(source))

    missing = find_unfilled(model, fill)
    if missing:
        raise WeightSyncError(f"the sent weights do not fill {listed(missing)} of sglang's model", missing)
    read = None if source.directory else read_back.compare(model, source)
    source.close()
    return read


@torch.no_grad()
def find_unfilled(model: torch.nn.Module, load: Callable[[], Any]) -> list[str]:
    """Load, and return SGLang's names of the parameters that did not get all their elements.

    SGLang's models skip a name that they do not know, at most with a log line, and do not report what they lack. This
    function therefore sets elements all over each parameter to NaN first, which no weight is. If an element is still
    NaN after the load, it gets its old value back. Scales of quantized keys and values, which a checkpoint need not
    hold, and parameters of 8 bits or of integers are not checked.
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
