"""What vLLM's own processes said before they died: they write to this process's log and tell nobody else."""

from __future__ import annotations

import os
import re
from pathlib import Path

TAIL_BYTES = 1 << 17

_ERROR = re.compile(r"^\((?:EngineCore|Worker)[^)]*\) ERROR [^\]]*\] ([\w.]*(?:Error|Exception|Interrupt)\b.*)$")


def last_words(log: Path = Path("/proc/self/fd/2")) -> str:
    """The last error in a log that one of vLLM's processes wrote; empty where there is none, or nothing to read.

    Args:
        log: what they write to; as it stands, this process's standard error, where that is a file.
    """
    try:
        with log.resolve(strict=True).open("rb") as file:
            if not os.path.isfile(file.name):
                return ""
            file.seek(max(0, os.path.getsize(file.name) - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    said = (_ERROR.match(line) for line in reversed(lines))
    return next((match[1].strip() for match in said if match), "")
