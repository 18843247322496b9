"""Draws the curves of the learning benchmark. Runs in an environment with matplotlib; figures come as JSON."""

from __future__ import annotations

import json
import sys

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

PENS = [(9.0, 0.25), (4.5, 0.5), (1.2, 1.0)]
"""Width and opacity of a curve of each training engine."""


def draw(curves: dict[str, list[list[float]]], path: str) -> None:
    """Draw the programs, with the range of their seeds, and the pairs of engines beside them.

    Of pairs, a colour is a rollout engine, and a width a training engine, so that equal curves are all seen.

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
        trains, rollouts = (list(dict.fromkeys(name.split(" x ")[part] for name in sides)) for part in (0, -1))
        for name, runs in sides.items():
            train, rollout = trains.index(name.split(" x ")[0]), rollouts.index(name.split(" x ")[-1])
            color = f"C{rollout}"
            width, alpha = (1.6, 1.0) if sides is several else PENS[train % len(PENS)]
            steps = range(1, len(runs[0]) + 1)
            values = list(zip(*runs))
            means = [sum(of) / len(of) for of in values]
            axis.plot(steps, means, color=color, label=name, linewidth=width, alpha=alpha)
            if len(runs) > 1:
                axis.fill_between(steps, [min(v) for v in values], [max(v) for v in values], color=color, alpha=0.2)
        axis.set(xlabel="step", ylim=(0, 1))
        axis.grid(color="0.92", linewidth=0.6)
        axis.legend(**({"fontsize": 8, "loc": "lower right"} if sides is several else {"fontsize": 7, "ncol": 3}))
    axes[0][0].set_ylabel("mean reward of the step's 64 answers")
    titles = {id(several): "three seeds: mean and range", id(alone): "seed 0, each pair of engines"}
    for axis, sides in zip(axes[0], panels):
        axis.set_title(titles[id(sides)], fontsize=10)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    draw(**json.load(sys.stdin))
