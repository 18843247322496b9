"""The learning rate as a function of the optimizer step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from enginehouse.errors import ConfigError

if TYPE_CHECKING:
    from enginehouse.engines.options import TrainOptions


def learning_rate(step: int, options: TrainOptions) -> float:
    """Learning rate of optimizer step `step`, counted from 0.

    Linear warm-up reaches `lr` at step `warmup_steps - 1`; the decay reaches `lr * min_lr_ratio` at
    step `total_steps` and stays there.

    Raises:
        ConfigError: the schedule decays and `total_steps` is not set.
    """
    if step < options.warmup_steps:
        return options.lr * (step + 1) / options.warmup_steps
    if options.schedule == "constant":
        return options.lr
    if options.total_steps is None:
        raise ConfigError(f"schedule {options.schedule!r} needs total_steps: the optimizer steps of the whole run")
    progress = min(1.0, (step - options.warmup_steps) / max(1, options.total_steps - options.warmup_steps))
    left = 1.0 - progress if options.schedule == "linear" else (1.0 + math.cos(math.pi * progress)) / 2
    return options.lr * (options.min_lr_ratio + (1.0 - options.min_lr_ratio) * left)
