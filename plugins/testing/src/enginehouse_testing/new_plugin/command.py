"""The command `enginehouse new-plugin`."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from enginehouse_testing.new_plugin.kinds import KINDS, certify_line


@click.command("new-plugin")
@click.argument("name")
@click.option(
    "--kind",
    "kinds",
    required=True,
    multiple=True,
    type=click.Choice(list(KINDS)),
    help="Kind of plugin in the package; may be repeated: --kind loss --kind advantage.",
)
@click.option(
    "--from",
    "starts",
    multiple=True,
    metavar="transformers|torch",
    help="Working code to start from: transformers for --kind rollout, torch for --kind train.",
)
@click.option("--author", default="", help="Author in the metadata of the package.")
@click.option("--directory", type=click.Path(), help="Directory of the package; unset: ./NAME.")
def new_plugin(name: str, kinds: tuple[str, ...], starts: tuple[str, ...], author: str, directory: str | None) -> None:
    """Create a plugin package NAME from a template.

    The package has a manifest, typed options, a README, tests, a changelog, a licence (Apache-2.0), constraints, and
    workflows that test and release it. It can be installed at once. Each method that you have to write says what
    it must do, and its test fails with file and line until then.

    \b
    enginehouse new-plugin acme-rollout --kind rollout --from transformers
    enginehouse new-plugin acme-algorithm --kind loss --kind advantage --author "Ada Acme"

    Exit codes: 0 created, 2 a mistake in the command.
    """
    from enginehouse_testing.new_plugin.making import NewPlugin, check_starts, make

    kinds = tuple(dict.fromkeys(kinds))
    plugin = NewPlugin(name, kinds, check_starts(kinds, starts), author)
    where = Path(directory or name)
    files = make(plugin, where)
    click.echo(f"{name}: {', '.join(KINDS[kind].says for kind in kinds)}, in {where}/")
    for file in files:
        click.echo(f"  {file}")
    click.echo("Next:")
    for line in next_commands(plugin, where):
        click.echo(f"  {line}")


def next_commands(plugin, where: Path) -> list[str]:
    """Return the commands that the author runs next."""
    certify = [certify_line(plugin.module, kind) for kind in plugin.kinds if KINDS[kind].suite]
    return [
        f'cd {shlex.quote(str(where))} && pip install -c constraints.txt -e ".[test]"',
        "pytest                        # runs the checks, or names each method that you still have to write",
        *(certify or [f"enginehouse {plugin.name} --help"]),
    ]
