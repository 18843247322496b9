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
    help="The file; default: report.html in the run's directory, or here for several runs.",
)
@click.option("--open", "open_", is_flag=True, help="Open it in a browser.")
def report(runs: tuple[Path, ...], out: Path | None, open_: bool) -> None:
    """Write one page of a run, or of several side by side.

    A RUN is a run directory. The page is one HTML file with all it needs: curves, alarms, samples with their tokens, a
    timeline, the config. It asks nothing of any host, and can be sent to somebody.
    """
    from enginehouse.errors import UserError
    from enginehouse_report.page import NAME, write_report

    unique = tuple(dict.fromkeys(run.absolute() for run in runs))
    path = out or (unique[0] / NAME if len(unique) == 1 else Path(NAME))
    try:
        size = write_report(unique, path)
    except OSError as error:
        raise UserError(
            f"{path} cannot be written: {error.strerror or error}. Name another file: --out FILE"
        ) from error
    click.echo(f"written: {path} ({size / 1e6:.1f} MB)")
    if open_:
        webbrowser.open(path.absolute().as_uri())


@click.command()
@click.argument("run", metavar="RUN", type=_RUN)
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="The port; default: one that is free.")
@click.option("--open", "open_", is_flag=True, help="Open it in a browser.")
def watch(run: Path, port: int, open_: bool) -> None:
    """Show a run while it runs: the page of `report`, which shows what is new.

    A RUN is a run directory; it may be one that is yet to be made. The page is served on this machine alone, at an
    address that nobody can guess. Ctrl-C ends it, and has no effect on the run.
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
@click.option("--json", "as_json", is_flag=True, help="Print the figures, as JSON.")
def bottleneck(run: Path, as_json: bool) -> None:
    """Say where a run's steps spend their time, and which key of its config would change it.

    A RUN is a run directory; it may still run.
    """
    import json
    from dataclasses import asdict

    from enginehouse_report.bottleneck import NEED_PROCESSES, find_bottleneck

    analysis = find_bottleneck(run)
    click.echo(json.dumps(asdict(analysis), indent=2) if as_json else analysis.said)
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if not as_json and load > cores and any(advice.key in NEED_PROCESSES for advice in analysis.advice):
        click.echo(
            f"This machine's load average is {load:.3g} now, on {cores} cores: if the run is here, what runs beside it "
            "takes a part of its time, and more processes may not win it back."
        )
