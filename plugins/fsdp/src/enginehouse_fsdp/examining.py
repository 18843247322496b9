"""Checks for `plan` that only this engine needs: whether a model's class can be split and adapted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from enginehouse_fsdp import adapters
from enginehouse_fsdp.context_parallel import check_sequence_split
from enginehouse_torch.modeling.examining import examine, examined_model

if TYPE_CHECKING:
    from enginehouse.engines.model import ModelSpec
    from enginehouse_fsdp.options import FSDPOptions


def examine_for(options: FSDPOptions, spec: ModelSpec) -> tuple[str, ...]:
    """Check a model as `examine` does, and against the options.

    Raises:
        ConfigError: the model's attention cannot be split, or the model lacks the layers to adapt.
        ModelError: as `examine`.
    """
    notes = examine(spec)
    model = examined_model(spec)
    if options.context_parallel > 1:
        check_sequence_split(model, options.context_parallel, options.tensor_parallel)
    if options.lora is not None and (note := adapters.describe_left_out(model, options.lora)):
        notes = (*notes, note)
    return notes
