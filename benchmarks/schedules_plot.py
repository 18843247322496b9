"""Draws the reward curves of the schedules benchmark. Runs in an environment with matplotlib; figures come as JSON."""

from __future__ import annotations

import json
import sys

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot


def draw(curves: dict[str, list[dict[str, list[float]]]], path: str) -> None:
    """Draw each side's runs, over steps and over seconds, to `path`.

    Args:
        curves: by side, `seconds` and `rewards` of each run, with one entry per step.
        path: a file.
    """
    figure, (by_step, by_time) = pyplot.subplots(1, 2, figsize=(9.6, 4.0), layout="constrained", sharey=True)
    for number, (side, runs) in enumerate(curves.items()):
        for run in runs:
            look = {"color": f"C{number}", "label": side if run is runs[0] else None, "linewidth": 1.2}
            by_step.plot(range(1, len(run["rewards"]) + 1), run["rewards"], **look)
            by_time.plot(run["seconds"], run["rewards"], **look)
    by_step.set(xlabel="step", ylabel="mean reward of the step's samples", ylim=(0, 1))
    by_time.set(xlabel="seconds since the first step ended")
    by_step.legend()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    draw(**json.load(sys.stdin))
