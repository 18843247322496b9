"""What this package adds to enginehouse: commands that show a run. Light: nothing is imported until it is used."""

from __future__ import annotations

from enginehouse.plugin import hookimpl

enginehouse_protocol = "1.1"

SECONDS = {"interrupted": 2.0}
"""How long the report at a run's end may read samples: whoever interrupted a run waits."""
SECONDS_OTHERWISE = 10.0


@hookimpl
def enginehouse_commands(cli):
    from enginehouse_report.cli import bottleneck, report, watch

    for command in (bottleneck, report, watch):
        cli.add_command(command)


@hookimpl
def enginehouse_run_recorded(directory, outcome):
    """Leave a page of the run in its directory."""
    from pathlib import Path

    from enginehouse_report.page import NAME, write_report

    path = Path(directory)
    write_report([path], path / NAME, seconds=SECONDS.get(outcome, SECONDS_OTHERWISE))
