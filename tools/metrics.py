"""Write docs/metrics.md, the page of every metric that a run writes, from `enginehouse_rl.metrics`: `make metrics`."""

from pathlib import Path

from enginehouse_rl.metrics import SECTIONS, Metric

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
HEAD = """\
# Metrics

`make metrics` wrote this page. A run writes a line for each step to `metrics.jsonl` and a line for each validation to
`validation.jsonl` in its [run directory](run-directory.md). Trackers get the same metrics.

A part of a name in angle brackets stands for many names. Plugins may write further metrics under other names. Fractions
lie between 0 and 1. The unit `reward` is that of the run's reward. A value that is not finite is written as `null`.

When the metrics indicate a problem, the run raises an [alarm](no-learning.md#alarms), which says what to try. The
column "if it is not" names the alarm of a metric.
"""


def make_page() -> str:
    """Return the text of the page."""
    parts = [HEAD]
    for section in SECTIONS:
        rows = [_make_row(metric) for metric in section.metrics]
        table = ["| metric | unit | what it is | normal | if it is not |", "|---|---|---|---|---|", *rows]
        parts.append("\n".join([f"## {section.title}\n", section.about, "", *table]) + "\n")
    return "\n".join(parts)


def _make_row(metric: Metric) -> str:
    name = f"`{metric.name}`"
    cells = (name, metric.unit or "none", metric.about, metric.normal or "–", metric.cure or "–")
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    PAGE.write_text(make_page(), encoding="utf-8")
