"""The terminal that tables are printed on."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def terminal() -> Console:
    """Standard output; piped, it has no width of its own, and rich would cut it to 80 columns."""
    from rich.console import Console

    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 140
    return Console(highlight=False, width=width)


def plain(text: str) -> str:
    """Text that rich does not read as markup."""
    from rich.markup import escape

    return escape(text)
