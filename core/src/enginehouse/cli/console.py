"""Tables and status lines on the terminal."""

from __future__ import annotations

import os
import shutil
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

COLOURS = {
    "ok": "green", "requirements missing": "yellow", "stale": "yellow", "being made": "yellow", "blocked": "dim",
}  # fmt: skip
"""Colours of states of plugins and runtimes. All other states are red."""


def terminal() -> Console:
    """Return a console for standard output. It is 140 columns wide on a pipe, where rich would use 80."""
    from rich.console import Console

    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 140
    return Console(highlight=False, width=width)


def show_what_is_checked() -> None:
    """Show the current check of a config in a status line on standard error, if that is a terminal."""
    import logging

    class StatusLine(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = record.getMessage()
            sys.stderr.write(f"\r\x1b[2K{text[: shutil.get_terminal_size().columns - 4]}{' ...' if text else ''}")
            sys.stderr.flush()

    if sys.stderr.isatty():
        checks = logging.getLogger("enginehouse.plugin.findings")
        checks.addHandler(StatusLine())
        checks.setLevel(logging.INFO)
        checks.propagate = False


def escape(text: str) -> str:
    """Escape text so that rich does not read it as markup."""
    from rich import markup

    return markup.escape(text)


def colour_state(state: str) -> str:
    """Return a state as coloured rich markup."""
    return f"[{COLOURS.get(state, 'red')}]{state}[/]"


def make_table(*columns: str) -> Table:
    """Return an empty table whose cells wrap."""
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
