"""Registers the commands, the page and the tracker that show a run. Modules are imported on first use."""

from __future__ import annotations

from enginehouse.plugin import Tracker, hookimpl

enginehouse_protocol = "1.1"

SECONDS = {"interrupted": 2.0}
"""Time limits for reading samples at the end of a run, by its outcome. The user waits for an interrupted run to end."""
SECONDS_OTHERWISE = 10.0


@hookimpl
def enginehouse_commands(cli):
    from enginehouse_report.cli import bottleneck, report, watch

    for command in (bottleneck, report, watch):
        cli.add_command(command)


@hookimpl
def enginehouse_run_recorded(directory, outcome):
    """Write a page of the run into its directory."""
    from pathlib import Path

    from enginehouse_report.page import NAME, write_report

    path = Path(directory)
    write_report([path], path / NAME, seconds=SECONDS.get(outcome, SECONDS_OTHERWISE))


@hookimpl
def enginehouse_register_trackers(register):
    register(
        Tracker(
            name="prometheus",
            summary="Metrics for Prometheus to fetch, at a port of the run's own process",
            tracker="enginehouse_report.prometheus:Prometheus",
        )
    )
