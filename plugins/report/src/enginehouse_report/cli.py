"""The commands `report`, `watch` and `bottleneck`."""

from __future__ import annotations

import os
import webbrowser
from pathlib import Path

import click

_RUN = click.Path(path_type=Path)


@click.command()
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=_RUN)
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Output file; default: report.html in the run directory, or in the current directory for several runs.",
)
@click.option("--show-host", is_flag=True, help="Show the host name and the absolute path of each run.")
@click.option("--open", "open_", is_flag=True, help="Open the page in a browser.")
def report(runs: tuple[Path, ...], out: Path | None, show_host: bool, open_: bool) -> None:
    """Write an HTML page of one run or of several side by side.

    RUN is a run directory. The page is one file with curves, alarms, samples, timeline and config. It loads nothing
    from the network, so you can send it to others.
    """
    from enginehouse.errors import UserError
    from enginehouse_report.page import NAME, write_report

    unique = tuple(dict.fromkeys(run.absolute() for run in runs))
    path = out or (unique[0] / NAME if len(unique) == 1 else Path(NAME))
    try:
        size = write_report(unique, path, show_host=show_host)
    except OSError as error:
        raise UserError(
            f"{path} cannot be written: {error.strerror or error}. Name another file: --out FILE"
        ) from error
    click.echo(f"written: {path} ({size / 1e6:.1f} MB)")
    if open_:
        webbrowser.open(path.absolute().as_uri())


@click.command()
@click.argument("run", metavar="RUN", type=_RUN)
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port to serve on; default: a free port.")
@click.option("--open", "open_", is_flag=True, help="Open the page in a browser.")
def watch(run: Path, port: int, open_: bool) -> None:
    """Serve a live page of a run.

    RUN is a run directory, which need not exist yet. The page is that of `report` and updates itself. It is served only
    on this machine, at an address that cannot be guessed. Ctrl-C stops the server and leaves the run alone.
    """
    from enginehouse_report.run_files import is_run, near_runs
    from enginehouse_report.server import serve

    if not is_run(run):
        click.echo(f"no run is in {run} yet: it is shown once it begins. {near_runs(run)}")

    def ready(url: str) -> None:
        click.echo(f"{run}: {url}\nCtrl-C ends this, not the run.")
        if open_:
            webbrowser.open(url)

    serve(run, port, ready)


@click.command()
@click.argument("run", metavar="RUN", type=_RUN)
@click.option("--json", "as_json", is_flag=True, help="Print the measurements as JSON.")
def bottleneck(run: Path, as_json: bool) -> None:
    """Show where a run spends its time and which key changes it.

    RUN is a run directory. The run may still be in progress.
    """
    import json
    from dataclasses import asdict

    from enginehouse_report.bottleneck import NEED_PROCESSES, find_bottleneck

    analysis = find_bottleneck(run)
    click.echo(json.dumps(asdict(analysis), indent=2) if as_json else analysis.said)
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if not as_json and load > cores and any(advice.key in NEED_PROCESSES for advice in analysis.advice):
        click.echo(
            f"The load average of this machine is {load:.3g} on {cores} cores. If the run is on this machine, other "
            "programs slow it down, and more processes may not help."
        )
