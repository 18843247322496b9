"""Finds the error that vLLM's processes logged last, which no exception that reaches this process contains."""

from __future__ import annotations

import os
import re
from pathlib import Path

TAIL_BYTES = 1 << 17

BENEATH, HERE = "EngineCore|Worker", "MainProcess"
"""vLLM's names of its processes, and of the process that started them."""


def last_words(log: Path = Path("/proc/self/fd/2"), process: str = BENEATH) -> str:
    """Return the last error that `process` wrote to a log, or an empty string if there is none or no log file.

    The default log is this process's standard error.
    """
    try:
        with log.resolve(strict=True).open("rb") as file:
            if not os.path.isfile(file.name):
                return ""
            file.seek(max(0, os.path.getsize(file.name) - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    error = re.compile(rf"^\((?:{process})[^)]*\) ERROR [^\]]*\] ([\w.]*(?:Error|Exception|Interrupt)\b.*)$")
    matches = (error.match(line) for line in reversed(lines))
    return next((match[1].strip() for match in matches if match), "")
