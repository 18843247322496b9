"""Loads a staged version inside SGLang's processes: the `custom_weight_loader` of a server that a worker started.

SGLang calls `load` in each process of the model with what the worker sent by `/update_weights_from_tensor`: not the
weights, but their place in this host's memory. `load` does not raise, because that would end the process; it writes
the outcome to the reports. What the model holds is compared with the version at the end of the update, because SGLang
then packs parameters for some kernels.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch

from enginehouse.engines.weights import WeightSyncError
from enginehouse.errors import listed
from enginehouse.weights.read_back import ReadBack, ReadRegions
from enginehouse.weights.reports import Reporter
from enginehouse.weights.staged_source import StagedSource
from enginehouse_sglang.adapter_loader import replace_adapter

MARKS = 4096
"""Maximum number of elements of a parameter that `find_unfilled` marks with NaN. There are several for each tensor that
SGLang joins in the parameter, such as heads of queries, keys and values, or a layer's experts."""

MARKED = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of the parameters that `find_unfilled` checks."""

NOT_SENT = (".k_scale", ".v_scale")
"""Endings of parameters that a checkpoint need not hold."""

READ_BACKS: WeakKeyDictionary[torch.nn.Module, ReadBack] = WeakKeyDictionary()
"""By model, of which a process has one."""

LOADER = f"{__name__}.load"
"""SGLang's name for `load`, as `--custom-weight-loader` and as `load_format`."""


def build_order(
    source: dict[str, Any], reports: str, reads_back: bool = True, adapter: Mapping[str, Any] | None = None
) -> list[tuple[str, torch.Tensor]]:
    """Return the message that is sent to SGLang instead of tensors.

    Args:
        source: `Version.source`, or `{"directory": PATH}`.
        reports: Path of the `Reports`.
        reads_back: True to compare the model with the version after the load.
        adapter: `adapter_settings`, if the version is an adapter.
    """
    text = json.dumps({**source, "reports": reports, "reads_back": reads_back, "adapter": adapter}).encode()
    return [("enginehouse", torch.frombuffer(bytearray(text), dtype=torch.uint8))]


def load(model: Any, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Load a version, and check beside it that memory holds every parameter as it was staged."""
    order = json.loads(bytes(named_tensors[0][1].cpu().tolist()))
    rank, ranks = 0, 1
    if torch.distributed.is_initialized():
        rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    reporter = Reporter(order["reports"], rank)
    _compare_after_processing()
    reporter.run(lambda: _load(model, order, reporter, rank, ranks))


def _load(model: Any, order: dict[str, Any], reporter: Reporter, rank: int, ranks: int) -> list[ReadRegions] | None:
    source = StagedSource(order.get("parameters", ()), order.get("directory", ""))
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # a pause in place leaves the last pass running
    if order["adapter"]:
        with source.checked(rank, ranks):
            read = replace_adapter(model, source, order["adapter"])
        source.close()
        ADAPTED.add(model)
        return read
    read_back = READ_BACKS.setdefault(model, ReadBack())

    def fill() -> None:
        with read_back.watch():
            model.load_weights(read_back.follow(source))

    with source.checked(rank, ranks):
        missing = find_unfilled(model, fill)
    if missing:
        raise WeightSyncError(f"the sent weights do not fill {listed(missing)} of sglang's model", missing)
    LOADED[model] = Loaded(read_back, source, reporter, order["reads_back"])
    return None


@dataclass(frozen=True)
class Loaded:
    """A version that is loaded and not yet compared with the model."""

    read_back: ReadBack
    source: StagedSource
    reporter: Reporter
    reads_back: bool

    def compare(self, model: torch.nn.Module) -> list[ReadRegions] | None:
        reads = self.reads_back and not self.source.directory
        read = self.read_back.compare(model, self.source) if reads else None
        self.source.close()
        return read


LOADED: WeakKeyDictionary[torch.nn.Module, Loaded] = WeakKeyDictionary()
"""By model, from the load to the end of the update."""

ADAPTED: WeakSet[torch.nn.Module] = WeakSet()
"""Models whose adapter alone was replaced, until the end of the update."""


@cache
def _compare_after_processing() -> None:
    """Have SGLang compare the model at the end of an update, after it has packed parameters for its kernels."""
    from sglang.srt.model_loader.loader import DefaultModelLoader

    process = DefaultModelLoader.postprocess_weights

    def process_and_compare(model: torch.nn.Module, target_device: torch.device) -> None:
        loaded = LOADED.pop(model, None)
        if model in ADAPTED:
            return ADAPTED.discard(model)  # its other weights are packed already
        if loaded is None:
            return process(model, target_device)
        with loaded.read_back.watch():
            process(model, target_device)
        loaded.reporter.run(lambda: loaded.compare(model))

    DefaultModelLoader.postprocess_weights = staticmethod(process_and_compare)


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
