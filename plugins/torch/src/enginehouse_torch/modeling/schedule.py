"""The learning rate as a function of the optimizer step, and of the parameter."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from enginehouse.errors import ConfigError, nearest

if TYPE_CHECKING:
    from enginehouse.engines.options import GroupedTrainOptions, TrainOptions


__all__ = ["learning_rate", "lr_factors"]


def learning_rate(step: int, options: TrainOptions) -> float:
    """Return the learning rate of optimizer step `step`, counted from 0.

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


def lr_factors(names: Iterable[str], options: GroupedTrainOptions) -> dict[str, float]:
    """Return each parameter's learning rate factor: the factor of the first pattern that matches its name, or 1.

    Raises:
        ConfigError: a pattern matches no parameter.
    """
    factors = dict.fromkeys(names, 1.0)
    for pattern, factor in reversed(options.lr_groups.items()):
        matching = [name for name in factors if fnmatchcase(name, pattern)]
        if not matching:
            patterns = {re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in factors}
            raise ConfigError(f"lr_groups: no trained parameter matches {pattern!r}. {nearest(pattern, patterns)}")
        factors |= dict.fromkeys(matching, factor)
    return factors
