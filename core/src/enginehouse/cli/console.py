"""The terminal that tables are printed on."""

from __future__ import annotations

import os
import shutil
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def terminal() -> Console:
    """Standard output; piped, it has no width of its own, and rich would cut it to 80 columns."""
    from rich.console import Console

    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 140
    return Console(highlight=False, width=width)


def show_what_is_checked() -> None:
    """On a terminal, show what the check of a config is at: a line on standard error, gone when it is done."""
    import logging

    class Line(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said = record.getMessage()
            sys.stderr.write(f"\r\x1b[2K{said[: shutil.get_terminal_size().columns - 4]}{' ...' if said else ''}")
            sys.stderr.flush()

    if sys.stderr.isatty():
        checks = logging.getLogger("enginehouse.plugin.findings")
        checks.addHandler(Line())
        checks.setLevel(logging.INFO)
        checks.propagate = False


def escape(text: str) -> str:
    """Return text that rich does not read as markup."""
    from rich import markup

    return markup.escape(text)
