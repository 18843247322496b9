"""Data: the batch every role exchanges, how it is cut into micro-batches, and the files it comes from.

Names are imported when first used: checking a data file needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from enginehouse.data.batch import Batch
    from enginehouse.data.demonstrations import DemonstrationDataset, DemonstrationSampler
    from enginehouse.data.errors import BatchError, UnknownColumnError, WireVersionError
    from enginehouse.data.files import check_demonstration_file, check_prompt_file
    from enginehouse.data.microbatch import plan_microbatches
    from enginehouse.data.prompts import PromptDataset, PromptSampler
    from enginehouse.data.ragged import Ragged
    from enginehouse.data.sampler import Sampler
    from enginehouse.data.wire import WIRE_VERSION

__all__ = [
    "WIRE_VERSION",
    "Batch",
    "BatchError",
    "DemonstrationDataset",
    "DemonstrationSampler",
    "PromptDataset",
    "PromptSampler",
    "Ragged",
    "Sampler",
    "UnknownColumnError",
    "WireVersionError",
    "check_demonstration_file",
    "check_prompt_file",
    "plan_microbatches",
]

_MODULES = {
    "WIRE_VERSION": "wire",
    "Batch": "batch",
    "BatchError": "errors",
    "DemonstrationDataset": "demonstrations",
    "DemonstrationSampler": "demonstrations",
    "PromptDataset": "prompts",
    "PromptSampler": "prompts",
    "Ragged": "ragged",
    "Sampler": "sampler",
    "UnknownColumnError": "errors",
    "WireVersionError": "errors",
    "check_demonstration_file": "files",
    "check_prompt_file": "files",
    "plan_microbatches": "microbatch",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
