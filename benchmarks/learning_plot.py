"""Draws the curves of the learning benchmark. Runs in an environment with matplotlib; figures come as JSON."""

from __future__ import annotations

import json
import sys

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot


def draw(curves: dict[str, list[list[float]]], path: str) -> None:
    """Draw the programs, with the range of their seeds, and the pairs of engines beside them.

    Args:
        curves: by side, for each run, the mean reward of each step.
        path: a file.
    """
    several = {name: runs for name, runs in curves.items() if len(runs) > 1}
    alone = {name: runs for name, runs in curves.items() if len(runs) == 1}
    panels = [panel for panel in (several, alone) if panel]
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(4.8 * len(panels), 3.6), layout="constrained", sharey=True, squeeze=False
    )
    for axis, sides in zip(axes[0], panels):
        for number, (name, runs) in enumerate(sides.items()):
            steps = range(1, len(runs[0]) + 1)
            values = list(zip(*runs))
            axis.plot(steps, [sum(of) / len(of) for of in values], color=f"C{number}", label=name, linewidth=1.6)
            if len(runs) > 1:
                axis.fill_between(
                    steps, [min(v) for v in values], [max(v) for v in values], color=f"C{number}", alpha=0.2
                )
        axis.set(xlabel="step", ylim=(0, 1))
        axis.grid(color="0.92", linewidth=0.6)
        axis.legend(fontsize=8, loc="lower right")
    axes[0][0].set_ylabel("mean reward of the step's 64 answers")
    titles = {id(several): "three seeds: mean and range", id(alone): "seed 0, each pair of engines"}
    for axis, sides in zip(axes[0], panels):
        axis.set_title(titles[id(sides)], fontsize=10)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    draw(**json.load(sys.stdin))
