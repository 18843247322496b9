"""The tracker `prometheus`, asked over HTTP as Prometheus asks, and read by the parser of its own client."""

import json
import math
import socket
import socketserver
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from enginehouse.engines.tracker import RunFacts
from enginehouse.plugin import load_plugins
from enginehouse_report import prometheus
from enginehouse_rl.plan.trackers import TrackerPlan
from enginehouse_rl.runs import RunDirectory

FACTS = {"name": "first", "config": {"train": {"steps": 9}}, "resumed_after": 0, "versions": {"enginehouse": "0.1.0"}}
Served = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture(autouse=True)
def a_server_ends_at_once(monkeypatch: pytest.MonkeyPatch):
    """The client's server looks twice a second whether it is to end, and each test would wait for that."""
    monkeypatch.setattr(socketserver.BaseServer.serve_forever, "__defaults__", (0.01,))


class Run:
    """A tracker of a run in a directory, and what it serves."""

    def __init__(self, directory: Path, facts=None, **arguments):
        self.directory = directory
        self.tracker = prometheus.Prometheus(**{"port": 0, "linger_seconds": 0, **arguments})
        self.tracker.start(RunFacts(directory=directory, **FACTS | (facts or {})))
        ((target,),) = [one["targets"] for one in json.loads(self.targets.read_text())]
        self.url = f"http://{target}/metrics"

    @property
    def targets(self) -> Path:
        return self.directory / "prometheus" / "first.json"

    def fetch(self) -> Served:
        with urllib.request.urlopen(self.url) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
        assert len({family.name for family in families}) == len(families)
        samples = [sample for family in families for sample in family.samples]
        served = {(one.name, frozenset(one.labels.items())): one.value for one in samples}
        assert len(served) == len(samples)
        return served

    def of_the_run(self, name: str) -> float:
        return self.fetch()[f"enginehouse_run_{name}", frozenset({("run", "first")})]

    def status(self) -> str:
        (labels,) = [dict(labels) for name, labels in self.fetch() if name == "enginehouse_run_info"]
        return labels["status"]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    made.tracker.finish("finished")


def series(metric: str, kind: str, name: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return name, frozenset({"run": "first", "kind": kind, "metric": metric}.items())


def test_the_newest_value_of_each_metric_is_served(run: Run):
    run.tracker.log(1, {"reward/mean": 0.25, "loss": 3.0}, "train")
    run.tracker.log(2, {"reward/mean": math.nan, "grad_norm": math.inf}, "train")
    run.tracker.log(1, {"validation/reward": 0.5}, "validation")  # beside later steps
    served = run.fetch()
    assert math.isnan(served[series("reward/mean", "train", "enginehouse_reward_mean")])
    assert served[series("loss", "train", "enginehouse_loss")] == 3.0
    assert served[series("grad_norm", "train", "enginehouse_grad_norm")] == math.inf
    assert served[series("validation/reward", "validation", "enginehouse_validation_reward")] == 0.5
    assert (run.of_the_run("step"), run.of_the_run("steps")) == (2, 9)
    assert run.status() == "running"


def test_what_steps_count_is_added_up_so_that_a_slow_scraper_misses_none(run: Run):
    for step, restarts in enumerate((0.0, 2.0, 1.0), 1):
        run.tracker.log(step, {"rollout/restarts": restarts, "feed/failed_time": 1.0, "rollout/replicas": 2.0}, "train")
    served = run.fetch()
    assert served[series("rollout/restarts", "train", "enginehouse_rollout_restarts_total")] == 3.0
    assert served[series("feed/failed_time", "train", "enginehouse_feed_failed_time_total")] == 3.0
    assert served[series("rollout/replicas", "train", "enginehouse_rollout_replicas")] == 2.0
    assert not [name for name, _ in served if name in ("enginehouse_rollout_restarts", "enginehouse_feed_failed_time")]


def test_alarms_are_counted_by_name_also_those_from_before_a_resume(run: Run):
    def told() -> dict[str, float]:
        served = run.fetch().items()
        return {dict(labels)["alarm"]: value for (name, labels), value in served if name == "enginehouse_alarms_total"}

    assert told() == {}
    rows = [{"step": 3, "alarm": "kl_runaway"}, {"step": 5, "alarm": "reward_zero"}]
    written = "".join(json.dumps(row) + "\n" for row in rows)
    (run.directory / "alarms.jsonl").write_text(written + '{"step": 6, "ala')  # being written
    assert told() == {"kl_runaway": 1, "reward_zero": 1}


def test_runs_say_in_one_folder_where_they_are(tmp_path: Path):
    folder = tmp_path / "shared" / "prometheus"
    trackers = {name: prometheus.Prometheus(0, name=name, targets=str(folder)) for name in ("a", "b/c")}
    for tracker in trackers.values():
        tracker.start(RunFacts(directory=tmp_path, **FACTS))
    assert sorted(one.name for one in folder.iterdir()) == ["a.json", "b_c.json"]
    trackers["a"].finish("finished")
    assert [one.name for one in folder.iterdir()] == ["b_c.json"]
    trackers["b/c"].finish("finished")


def test_a_resumed_run_begins_at_the_step_that_it_goes_on_from(tmp_path: Path):
    run = Run(tmp_path, facts={"resumed_after": 7})
    assert run.of_the_run("step") == 7
    run.tracker.finish("finished")


def test_whatever_metrics_are_called_none_is_taken_for_another(run: Run):
    names = ["a/b", "a_b", "a.b", "run/step", "run_info", "alarms", "alarms_total"]
    names += ["", "9", "größe", 'a "b" \\ c\nd', "\ud800"]
    run.tracker.log(3, {name: float(number) for number, name in enumerate(names)}, "train")
    run.tracker.log(3, {"a/b": 77.0}, "validation")
    served = run.fetch()
    of_steps = {dict(labels)["metric"]: value for (_, labels), value in served.items() if ("kind", "train") in labels}
    assert of_steps == {name.replace("\ud800", "\\ud800"): float(number) for number, name in enumerate(names)}
    assert served[series("a/b", "validation", "enginehouse_a_b")] == 77.0
    assert run.of_the_run("step") == 3


def test_names_without_end_are_cut_off_and_that_is_said_once(run: Run, caplog, monkeypatch):
    monkeypatch.setattr(prometheus, "MOST_METRICS", 4)
    for step in range(1, 5):
        run.tracker.log(step, {"loss": step, f"task/{step}": 1.0, f"task/{step}/other": 1.0}, "train")
    served = run.fetch()
    assert len([labels for _, labels in served if ("kind", "train") in labels]) == 4
    assert served[series("loss", "train", "enginehouse_loss")] == 4
    assert ["first 4 metrics" in one.getMessage() for one in caplog.records] == [True]


def test_the_end_waits_until_it_was_fetched_and_leaves_no_port_and_no_target(tmp_path: Path):
    run = Run(tmp_path, linger_seconds=25)
    run.fetch()
    ending = threading.Thread(target=run.tracker.finish, args=["failed"])
    ending.start()
    seen = []
    while "failed" not in seen:
        seen.append(run.status())
    ending.join(20)
    assert not ending.is_alive()
    assert not run.targets.exists()
    with pytest.raises(urllib.error.URLError):
        run.fetch()


@pytest.mark.parametrize(("fetched", "outcome"), [(False, "finished"), (True, "interrupted")])
def test_the_end_waits_for_nobody_who_never_came_and_not_when_interrupted(tmp_path: Path, fetched: bool, outcome):
    run = Run(tmp_path, linger_seconds=25)
    if fetched:
        run.fetch()
    ending = threading.Thread(target=run.tracker.finish, args=[outcome], daemon=True)
    ending.start()
    ending.join(15)
    assert not ending.is_alive()


def test_it_waits_on_loopback_unless_told_otherwise(tmp_path: Path):
    for given, waits_at, told in (
        ({}, "127.0.0.1", "127.0.0.1"),
        ({"address": "0.0.0.0"}, "0.0.0.0", socket.gethostname()),
    ):
        run = Run(tmp_path, **given)
        host, port = run.url.removeprefix("http://").removesuffix("/metrics").split(":")
        listening = [one.laddr for one in psutil.Process().net_connections("tcp") if one.status == psutil.CONN_LISTEN]
        assert host == told
        assert [ip for ip, at in listening if at == int(port)] == [waits_at]
        run.tracker.finish("finished")


def test_a_port_that_is_taken_is_said_with_its_key_and_the_run_goes_on(tmp_path: Path, caplog):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        record = load_plugins(enabled=["report"]).get("tracker", "prometheus")
        plan = TrackerPlan("prometheus", record.tracker, {"port": port})
        run = RunDirectory.create(tmp_path / "run", "model: {path: x}\n", trackers=[plan])
        run.log(1, {"loss": 1.0})
        run.finish("finished")
    (said,) = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert f"run.trackers, prometheus: port {port} at 127.0.0.1 cannot be used (Address already in use)" in said
    assert "set another `port`" in said
    assert [json.loads(line)["loss"] for line in (run.path / "metrics.jsonl").read_text().splitlines()] == [1.0]
    assert json.loads((run.path / "run.json").read_text())["status"] == "finished"
