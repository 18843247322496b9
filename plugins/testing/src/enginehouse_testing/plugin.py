"""The commands of this package: `certify`, `matrix`, `new-plugin`, `parity`, `plugins doctor`."""

from __future__ import annotations

from enginehouse.plugin import hookimpl

enginehouse_protocol = "1.0"


@hookimpl
def enginehouse_commands(cli):
    from enginehouse_testing.cli.certify import certify
    from enginehouse_testing.cli.matrix import matrix
    from enginehouse_testing.cli.parity import parity
    from enginehouse_testing.new_plugin.command import new_plugin

    for command in (certify, matrix, new_plugin, parity):
        cli.add_command(command)
    cli.add_lazy_command(
        "plugins doctor", "enginehouse_testing.doctor.command:doctor", "Examine a plugin, or all plugins."
    )
