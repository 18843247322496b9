"""What this package adds to enginehouse: what shows a run. Light: nothing is imported until it is used."""

from __future__ import annotations

from enginehouse.plugin import Tracker, hookimpl

enginehouse_protocol = "1.1"


@hookimpl
def enginehouse_register_trackers(register):
    register(
        Tracker(
            name="prometheus",
            summary="Metrics for Prometheus to fetch, at a port of the run's own process",
            tracker="enginehouse_report.prometheus:Prometheus",
        )
    )
