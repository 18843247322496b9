"""Measures how soon the command line answers (`--help`, `plugins list`), against an interpreter that does nothing."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

COMMANDS = {
    "python": [sys.executable, "-c", "pass"],
    "help": [str(Path(sys.executable).with_name("enginehouse")), "--help"],
    "plugins_list": [str(Path(sys.executable).with_name("enginehouse")), "plugins", "list"],
}


def measure(rounds: int = 20) -> dict[str, Any]:
    """Run the commands in turn and return each command's median wall time.

    Args:
        rounds: runs of each command, after one that does not count.
    """
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for number in range(rounds + 1):
        for name, command in COMMANDS.items():
            begun = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            if number:
                seconds[name].append(time.perf_counter() - begun)
    sides = {name: {"median_s": statistics.median(all_), "min_s": min(all_)} for name, all_ in seconds.items()}
    return {"metrics": {f"{name}_seconds": sides[name]["median_s"] for name in COMMANDS}, "sides": sides}
