"""What the tracker `prometheus` serves of a real run: all that examples/cluster's dashboard and alerts ask for."""

import json
import re
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import ray
import yaml
from prometheus_client.parser import text_string_to_metric_families

from .conftest import REPOSITORY, Start
from .run_process import until

pytestmark = pytest.mark.slow

EXAMPLE = REPOSITORY / "examples" / "cluster"
PPO = (
    "algorithm.advantage={name: gae, arguments: {lam: 0.9}}",
    "algorithm.kl={coefficient: 0.01, place: reward}",
    "reward.function=rewards:varied",
    "data.validation=examples/quickstart/work/validation.jsonl",
)
PROMETHEUS_OWN = ("up",)


def asked_for() -> set[str]:
    """The metrics, and patterns of metrics, in the dashboard's and the alerts' queries."""
    panels = json.loads((EXAMPLE / "grafana.json").read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel.get("targets", [])]
    groups = yaml.safe_load((EXAMPLE / "alerts.yml").read_text())["groups"]
    queries += [rule["expr"] for group in groups for rule in group["rules"]]
    named = {name for query in queries for name in re.findall(r'\b(?:enginehouse|ray)_\w+\b(?![.+"])', query)}
    return named | {found for query in queries for found in re.findall(r'__name__=~"([^"]+)"', query)}


def test_all_that_the_dashboard_and_the_alerts_ask_for_is_served(train: Start, house: Path):
    folder = house / "targets"
    tracker = f"{{name: prometheus, arguments: {{port: 0, targets: {folder}}}}}"
    run = train("train.steps=4", "cluster.launcher=inline", *PPO, f"run.trackers=[{tracker}]")
    ((target,),) = until_told(run, folder)
    served: dict[str, set[str]] = {}

    def ended() -> bool:
        try:
            with urllib.request.urlopen(f"http://{target}/metrics") as answer:
                families = list(text_string_to_metric_families(answer.read().decode()))
        except urllib.error.URLError:
            return True
        for one in families:
            name = f"{one.name}_total" if one.type == "counter" else one.name
            served[name] = {sample.labels.get("status", "") for sample in one.samples}
        return served["enginehouse_run_info"] == {"finished"}

    until(ended, "the end of the run", 120, alive=lambda: None)
    run.finished()
    assert served["enginehouse_run_info"] == {"finished"}
    ours = {name for name in asked_for() if name.startswith("enginehouse")}
    assert len(ours) > 35
    assert {name for name in ours if not any(re.fullmatch(name, one) for one in served)} == set()
    assert not list(folder.iterdir())


def until_told(run, folder: Path) -> list[list[str]]:
    """The targets that a run writes down once it serves."""
    written = run.until(lambda: folder.is_dir() and list(folder.glob("*.json")), "the file of targets")
    return [one["targets"] for one in json.loads(written[0].read_text())]


def test_what_is_asked_for_of_ray_is_there_in_its_own_dashboards():
    source = Path(ray.__file__).parent / "dashboard" / "modules"
    known = {
        name
        for file in [*(source / "metrics").rglob("*.py"), source / "reporter" / "reporter_agent.py"]
        for name in re.findall(r"\b(?:ray_)?((?:node|object_store)_\w+)\b", file.read_text())
    }
    wanted = {name.removeprefix("ray_") for name in asked_for() if name.startswith("ray_")}
    assert len(wanted) == 7
    assert wanted <= known
