"""docs/metrics.md is a copy of the page in the package, and that page describes every metric that the code names."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from enginehouse_report.prometheus import COUNTED
from enginehouse_rl.episodes import failures, feed
from enginehouse_rl.loop.alarms import ALARMS
from enginehouse_rl.metrics import find_metric, read_metrics, read_page

ROOT = Path(__file__).parents[2]
METRICS = tuple(read_metrics().values())
SOURCES = [
    path
    for folder in ("core/src", "plugins/rl/src", "plugins/torch/src", "plugins/fsdp/src", "plugins/megatron/src")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
BEGINNINGS = sorted({metric.name.split("/")[0] for metric in METRICS if "/" in metric.name})
BETWEEN_STEPS = {"validate", "checkpoint"}
"""Phases that the timeline has and no step: they lie between steps."""
NO_METRICS = {"validation/tool_calls", "feed/failed_", "validation/step"}
"""A reward's own metric, which a hint looks for; the beginning of several names; and an axis of Weights & Biases."""


def list_names(source: str) -> Iterator[str]:
    """Find the names of metrics that a source spells out, with `<>` for each part that it inserts."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "<>" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("clock.phase"):
            text = f"time/{node.args[0].value}" if isinstance(node.args[0], ast.Constant) else ""
            text = "" if text.removeprefix("time/") in BETWEEN_STEPS else text
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            text = f"time/{node.value.value}" if ast.unparse(node.targets[0]) == "phase" else ""
        else:
            continue
        if re.fullmatch(rf"({'|'.join(BEGINNINGS)}|<>)/[\w<>@/]*\w[\w<>@/]*", text) and text not in NO_METRICS:
            yield text


def is_described(name: str) -> bool:
    """True if a line of the table has the name, with a placeholder at most where the source inserts a part."""
    if "<>" not in name:
        metric = find_metric(name)
        return metric is not None and not metric.name.endswith(("<name>", "<metric>"))
    inserted = re.escape(name).replace("<>", ".*")
    return any(re.fullmatch(inserted, metric.name) for metric in METRICS)


def test_the_page_of_the_docs_is_that_of_the_package():
    page = ROOT / "docs" / "metrics.md"
    assert page.read_text(encoding="utf-8") == read_page(), "copy plugins/rl/src/enginehouse_rl/metrics.md there"


def test_every_metric_that_the_code_names_is_described():
    undescribed = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in SOURCES
        for name in list_names(path.read_text(encoding="utf-8"))
        if not is_described(name)
    }
    assert not undescribed, "give each a line in enginehouse_rl/metrics.md"
    groups = [*feed.REASONS, *failures.count_failures({}), "worker_restarts"]
    assert all(is_described(f"feed/{name}") for name in groups)


@pytest.mark.parametrize(
    "source",
    ["figures['reward/median'] = 1.0", "f'{prefix}/median'", "with self.clock.phase('think'): ...", "phase = 'think'"],
)
def test_a_metric_without_a_line_is_found(source: str):
    assert [name for name in list_names(source) if not is_described(name)]


def test_the_names_in_its_sentences_exist_and_every_alarm_is_among_them():
    quoted = set(re.findall(r"`([^`]+)`", read_page()))
    assert {alarm.name for alarm in ALARMS} <= quoted
    assert all(find_metric(name) for name in quoted if "/" in name and not name.endswith("/"))
    keys = {name.partition(":")[0] for name in quoted if re.match(r"[a-z_]+\.[a-z_.]+(: \w+)?$", name)}
    known = set(re.findall(r"^\| `([^`]+)`", (ROOT / "docs" / "config.md").read_text(encoding="utf-8"), re.M))
    assert {key for key in keys if not key.endswith((".jsonl", ".json"))} <= known


def test_every_metric_has_one_line():
    assert len(METRICS) == sum(line.startswith("| `") for line in read_page().splitlines())


def test_what_a_step_counts_is_what_prometheus_adds_up():
    steps = [metric for metric in METRICS if not metric.name.startswith("validation/")]
    counted = {metric.name for metric in steps if COUNTED.fullmatch(metric.name)}
    assert {metric.name for metric in steps if metric.unit == "count"} == counted - {"skipped"}
