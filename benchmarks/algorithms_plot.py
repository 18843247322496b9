"""Draws the recipes' learning curves. Runs in an environment with matplotlib, and gets the figures as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

COLUMNS = 5


def draw(curves: dict[str, dict[str, Any]], path: str) -> None:
    """Draw a panel for each recipe: mean and range of its seeds, and in grey the other recipes with the same figure.

    Args:
        curves: by recipe, `steps`, the values of each run after these steps (`runs`), and `figure`, their name.
        path: a file.
    """
    columns = min(COLUMNS, len(curves))
    rows = -(-len(curves) // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(2.4 * columns, 2.5 * rows), layout="constrained", sharey=True, squeeze=False
    )
    for panel, (name, of) in zip(axes.flat, curves.items()):
        for other, others in curves.items():
            if other != name and others["figure"] == of["figure"]:
                panel.plot(others["steps"], _mean(others["runs"]), color="0.85", linewidth=0.8)
        values = list(zip(*of["runs"]))
        panel.fill_between(of["steps"], [min(v) for v in values], [max(v) for v in values], color="C0", alpha=0.25)
        panel.plot(of["steps"], _mean(of["runs"]), color="C0", linewidth=1.6)
        panel.set_title(f"{name}: {_mean(of['runs'])[-1]:.2f}", fontsize=10)
        panel.set(ylim=(0, 1.02), xlim=(0, None))
        panel.grid(color="0.92", linewidth=0.6)
        panel.set_xlabel("step", fontsize=8)
        panel.set_ylabel(of["figure"], fontsize=8)
        panel.tick_params(labelsize=8, labelleft=True)
    for panel in axes.flat[len(curves) :]:
        panel.set_visible(False)
    figure.savefig(path, dpi=130)


def _mean(runs: list[list[float]]) -> list[float]:
    return [sum(values) / len(values) for values in zip(*runs)]


if __name__ == "__main__":
    draw(**json.load(sys.stdin))
