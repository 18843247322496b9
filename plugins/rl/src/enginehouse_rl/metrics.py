"""Describes every metric that a run writes: its unit, its meaning, its normal range, and what to do outside that range.

The tables are in `metrics.md` beside this file; `docs/metrics.md` is a copy. A part of a name in angle brackets stands
for many names: `reward/<name>`. A run also writes the metrics that plugins add, which are not listed.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import resources
from typing import NamedTuple

_PATTERNS = {"n": r"\d+", "k": r"\d+", "part": ".+", "metric": ".+"}
"""Patterns of placeholders; any other placeholder stands for a name without a slash."""


class Metric(NamedTuple):
    """A metric of `metrics.jsonl` or `validation.jsonl`.

    Attributes:
        section: The heading of its table.
        name: The name in the file, perhaps with placeholders.
        unit: The unit; empty for a number without one.
        about: Quantity that the metric measures, as a noun phrase.
        normal: The values to expect; empty where any value may be right.
        cure: Advice for the case that the value is not normal.
    """

    section: str
    name: str
    unit: str
    about: str
    normal: str
    cure: str

    def matches(self, name: str) -> bool:
        """True if `name` is the name of this metric, or results from filling the placeholders in this metric's name."""
        filled = re.sub(r"<(\w+)>", lambda found: _PATTERNS.get(found[1], "[^/]+"), self.name)
        return re.fullmatch(filled, name) is not None


def read_page() -> str:
    """Return the page of all metrics, as Markdown."""
    return resources.files(__package__).joinpath("metrics.md").read_text(encoding="utf-8")


@cache
def read_metrics() -> dict[str, Metric]:
    """Return all metrics by name, in the order of the page."""
    metrics = {}
    for section in read_page().split("\n## ")[1:]:
        title = section.partition("\n")[0]
        for name, unit, *cells in re.findall(r"^\| `(.*)` \| (.*) \| (.*) \| (.*) \| (.*) \|$", section, re.MULTILINE):
            about, normal, cure = (cell.replace("\N{EN DASH}", "") for cell in cells)
            metrics[name] = Metric(title, name, unit.replace("none", ""), about, normal, cure)
    return metrics


def find_metric(name: str) -> Metric | None:
    """Return the description of a metric; None for a metric that only a plugin knows."""
    metrics = read_metrics()
    return metrics.get(name) or next((metric for metric in metrics.values() if metric.matches(name)), None)
