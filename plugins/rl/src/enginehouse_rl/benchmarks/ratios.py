"""Metrics of lm-eval of which an item has several verdicts: over all items, such a metric is a ratio of two counts."""

from __future__ import annotations

from collections.abc import Mapping

RIGHT, OF = ".right", ".of"
"""Ends of the names of the two counts."""


def join_ratios(figures: Mapping[str, float]) -> dict[str, float]:
    """Return figures with a ratio in the place of each two that make one: `x.right` and `x.of` make `x`."""
    joined = dict(figures)
    for name in figures:
        if name.endswith(RIGHT):
            ratio = name.removesuffix(RIGHT)
            joined[ratio] = joined.pop(name) / joined.pop(ratio + OF)
    return joined
