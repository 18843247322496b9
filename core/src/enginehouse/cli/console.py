"""The terminal for tables."""

from __future__ import annotations

import os
import shutil
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def terminal() -> Console:
    """Return a console for standard output. A pipe has no width, and rich would use 80 columns."""
    from rich.console import Console

    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 140
    return Console(highlight=False, width=width)


def show_what_is_checked() -> None:
    """On a terminal, show the current check of a config as a line on standard error, which is removed at the end."""
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
    """Return text that rich does not read as markup."""
    from rich import markup

    return markup.escape(text)
