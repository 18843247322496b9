"""What vLLM said last of what went wrong: it wrote that to this process's log, and no error that reaches us has it."""

from __future__ import annotations

import os
import re
from pathlib import Path

TAIL_BYTES = 1 << 17

BENEATH, HERE = "EngineCore|Worker", "MainProcess"
"""vLLM's names of its own processes, and of the one that started it."""


def last_words(log: Path = Path("/proc/self/fd/2"), process: str = BENEATH) -> str:
    """The last error in a log that vLLM wrote; empty where there is none, or nothing to read.

    Args:
        log: what they write to; as it stands, this process's standard error, where that is a file.
        process: which of its processes wrote it: `BENEATH`, as one that has died, or `HERE`.
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
    said = (error.match(line) for line in reversed(lines))
    return next((match[1].strip() for match in said if match), "")
