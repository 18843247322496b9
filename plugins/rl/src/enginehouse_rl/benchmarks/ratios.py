"""Metrics of lm-eval with several verdicts per item. Over all items, such a metric is a ratio of two counts."""

from __future__ import annotations

from collections.abc import Mapping

RIGHT, OF = ".right", ".of"
"""Suffixes of the names of the two counts."""


def join_ratios(figures: Mapping[str, float]) -> dict[str, float]:
    """Return metrics in which a ratio replaces the two counts that make it: `x.right` and `x.of` become `x`."""
    joined = dict(figures)
    for name in figures:
        if name.endswith(RIGHT):
            ratio = name.removesuffix(RIGHT)
            joined[ratio] = joined.pop(name) / joined.pop(ratio + OF)
    return joined
