"""Draws the no-op times of the dispatch benchmark. Runs in an environment with matplotlib, and gets figures as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot


def draw(workers: list[int], lines: dict[str, dict[str, Any]], path: str) -> None:
    """Draw each side's times over the number of workers, and the line through them, to `path`."""
    figure, axes = pyplot.subplots(figsize=(6.4, 4.0), layout="constrained")
    for side, line in lines.items():
        fitted = [line["us_at_none"] + line["us_a_worker"] * size for size in workers]
        (drawn,) = axes.plot(workers, line["times"], "o")
        axes.plot(workers, fitted, color=drawn.get_color(), label=f"{side}: {line['us_a_worker']:.0f} us a worker")
    axes.set(xlabel="workers", ylabel="no-op call, median, us", xticks=workers, ylim=(0, None))
    axes.legend()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    draw(**json.load(sys.stdin))
