"""The tracker `prometheus`, which serves metrics during the run."""

from __future__ import annotations

import json
import logging
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from enginehouse.atomic import write_whole
from enginehouse.errors import EnginehouseError
from enginehouse_report.run_files import GrowingLines

if TYPE_CHECKING:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    from enginehouse.engines.tracker import MetricsKind, Outcome, RunFacts

log = logging.getLogger(__name__)

MOST_METRICS = 2000
"""Maximum number of metrics, because each is a time series on the Prometheus server."""
METRIC = ("run", "kind", "metric")
"""Labels of a run's metrics."""
OF_THE_RUN = (
    *("run_info", "run_step", "run_steps", "run_elapsed_seconds", "run_step_timestamp_seconds"),
    *("alarms", "alarms_total"),
)
"""Names of metrics about the run itself. If another metric has such a name, `_` is appended to it."""
COUNTED = re.compile(
    r"rollout/(restarts|retries)|feed/(refused|dropped|left_over|worker_restarts|failed_\w+)|reward/failures|(\w+/)?skipped"
)
"""Metrics that count the events of a step. The tracker serves their sums over the steps."""
EVERYWHERE = ("0.0.0.0", "::")
"""Addresses that stand for all interfaces of a machine, so that no other machine can use them as a target."""


class Prometheus:
    """Serves the newest value of each metric at `http://ADDRESS:PORT/metrics` until the run ends.

    A metric's name is `enginehouse_` and its name in the run, with `_` for each character that Prometheus does not
    allow: `enginehouse_reward_mean`. The label `metric` has the name in the run, which is unique. Counts of events
    (`COUNTED`) are summed since this process of the run started: `enginehouse_rollout_restarts_total`. Alarms are
    counted by name, from `alarms.jsonl`. A target file for Prometheus' `file_sd_configs` contains the address; it is
    deleted at the end unless the run is killed.

    Args:
        port: port to listen at; 0: any free port.
        address: address of the network interface; `0.0.0.0`: all interfaces. Clients are not authenticated.
        name: name of the run; unset: the name of the run directory.
        targets: directory of the target file `NAME.json`; unset: `prometheus` in the run directory. If all runs use one
            directory, one pattern finds them all.
        linger_seconds: maximum time for which the end of the run waits until its last metrics are fetched. It does not
            wait if no metrics were ever fetched.
    """

    def __init__(
        self,
        port: Annotated[int, Field(ge=0, le=65535)] = 9464,
        address: str = "127.0.0.1",
        name: str | None = None,
        targets: str | None = None,
        linger_seconds: Annotated[float, Field(ge=0, le=25)] = 20.0,
    ):
        self._port, self._address, self._name = port, address, name
        self._folder, self._linger = targets, linger_seconds

    def start(self, run: RunFacts) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        name = self._name or run.name
        self._metrics = _ServedMetrics(name, run)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self._metrics)
        try:
            self._server, _ = start_http_server(self._port, self._address, registry)
        except OSError as error:
            raise EnginehouseError(
                f"nothing is served for Prometheus: run.trackers, prometheus: port {self._port} at {self._address} "
                f"cannot be used ({error.strerror or error}); set another `port`, or 0 for any free port"
            ) from error
        self._targets = Path(self._folder or run.directory / "prometheus") / f"{name.replace('/', '_')}.json"
        self._write_target(self._server.server_port)

    def log(self, step: int, metrics: Mapping[str, float], kind: MetricsKind) -> None:
        self._metrics.take(step, metrics, kind)

    def finish(self, outcome: Outcome) -> None:
        # An interrupted run has no time left: it abandons trackers that wait.
        self._metrics.end(outcome, 0.0 if outcome == "interrupted" else self._linger)
        self._server.shutdown()
        self._server.server_close()
        self._targets.unlink(missing_ok=True)

    def _write_target(self, port: int) -> None:
        host = socket.gethostname() if self._address in EVERYWHERE else self._address
        target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._targets.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self._targets, json.dumps([{"targets": [target]}]) + "\n")
        log.info("metrics for Prometheus: http://%s/metrics", target)


class _ServedMetrics:
    """Collects metrics for `prometheus_client`. Several threads call its methods."""

    def __init__(self, name: str, run: RunFacts):
        self._run, self._step, self._status = _text(name), run.resumed_after, "running"
        self._steps = (run.config.get("train") or {}).get("steps")
        self._version = run.versions.get("enginehouse", "")
        self._alarms = GrowingLines(run.directory / "alarms.jsonl")
        self._began = self._stepped = time.time()
        self._values: dict[tuple[str, MetricsKind], float] = {}
        self._changed = threading.Condition()
        self._fetched = 0

    def take(self, step: int, metrics: Mapping[str, float], kind: MetricsKind) -> None:
        with self._changed:
            if kind == "train":
                self._step, self._stepped = step, time.time()
            before = len(self._values)
            for name, value in metrics.items():
                if (name, kind) in self._values or len(self._values) < MOST_METRICS:
                    so_far = self._values.get((name, kind), 0.0) if COUNTED.fullmatch(name) else 0.0
                    self._values[name, kind] = so_far + value
                elif before < MOST_METRICS:
                    before = MOST_METRICS
                    log.warning("Prometheus gets only the first %d metrics of this run", MOST_METRICS)

    def end(self, outcome: Outcome, seconds: float) -> None:
        """Set the outcome. If metrics were ever fetched, wait until the last metrics are fetched."""
        with self._changed:
            self._status, so_far = outcome, self._fetched
            if so_far:
                self._changed.wait_for(lambda: self._fetched > so_far, seconds)

    def collect(self) -> Iterable[CounterMetricFamily | GaugeMetricFamily]:
        with self._changed:
            self._fetched += 1
            self._changed.notify_all()
            return [*self._run_families(), self._alarm_family(), *self._step_families()]

    def _run_families(self) -> Iterable[GaugeMetricFamily]:
        status = _gauge("run_info", "State of the run", ["run", "status", "version"])
        status.add_metric([self._run, self._status, self._version], 1)
        yield status
        for name, help, value in (
            ("run_step", "The newest step", self._step),
            ("run_steps", "Planned number of steps", self._steps),
            ("run_elapsed_seconds", "Time since this process of the run began", time.time() - self._began),
            ("run_step_timestamp_seconds", "Time of the newest step", self._stepped),
        ):
            if value is not None:
                family = _gauge(name, help, ["run"])
                family.add_metric([self._run], value)
                yield family

    def _alarm_family(self) -> CounterMetricFamily:
        self._alarms.refresh()
        family = _counter("alarms", "Alarms of the run", ["run", "alarm"])
        for alarm, times in Counter(_text(str(row.get("alarm"))) for row in self._alarms.rows).items():
            family.add_metric([self._run, alarm], times)
        return family

    def _step_families(self) -> Iterable[CounterMetricFamily | GaugeMetricFamily]:
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for (name, kind), value in self._values.items():
            family = _family(name)
            if family not in families:
                families[family] = (
                    _counter(family, "Sum since this process of the run began", METRIC)
                    if COUNTED.fullmatch(name)
                    else _gauge(family, "Value of the newest step or validation that has this metric", METRIC)
                )
            families[family].add_metric([self._run, kind, _text(name)], value)
        return families.values()


def _gauge(name: str, help: str, labels: Sequence[str]) -> GaugeMetricFamily:
    from prometheus_client.core import GaugeMetricFamily

    return GaugeMetricFamily(f"enginehouse_{name}", help, labels=labels)


def _counter(name: str, help: str, labels: Sequence[str]) -> CounterMetricFamily:
    from prometheus_client.core import CounterMetricFamily

    return CounterMetricFamily(f"enginehouse_{name}", help, labels=labels)


def _family(name: str) -> str:
    family = re.sub(r"[^a-zA-Z0-9_]", "_", name)
    return f"{family}_" if family in OF_THE_RUN else family


def _text(name: str) -> str:
    """Return the value of a label. Characters that UTF-8 cannot encode become escapes."""
    return name.encode("utf-8", "backslashreplace").decode()
