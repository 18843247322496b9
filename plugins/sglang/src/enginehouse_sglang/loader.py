"""Loads a staged version inside SGLang's processes: the `custom_weight_loader` of a server that a worker started.

SGLang calls `load` in each process of the model with what the worker sent by `/update_weights_from_tensor`: not the
weights, but where in this host's memory they lie. It does not raise, since that would end the process; what came of it
stands in the reports.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from enginehouse.engines.reports import Reporter
from enginehouse.modeling.staged_source import StagedSource

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
    model.load_weights(iter(source))
    source.close()
