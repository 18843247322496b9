"""Registers commands, a page and a tracker that show a run. Imports modules when they are used."""

from __future__ import annotations

from enginehouse.plugin import Tracker, hookimpl

enginehouse_protocol = "1.1"

SECONDS = {"interrupted": 2.0}
"""Longest time for the report at a run's end to read samples: whoever interrupted the run waits."""
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
