"""What this package adds to enginehouse: the commands `certify`, `matrix` and `parity`."""

from __future__ import annotations

from enginehouse.plugin import hookimpl

enginehouse_protocol = "1.0"


@hookimpl
def enginehouse_commands(cli):
    from enginehouse_testing.cli.certify import certify
    from enginehouse_testing.cli.matrix import matrix
    from enginehouse_testing.cli.parity import parity

    for command in (certify, matrix, parity):
        cli.add_command(command)
