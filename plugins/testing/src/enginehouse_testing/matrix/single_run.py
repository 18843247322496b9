"""Runs one combination as a user would: `enginehouse train` in its own process, with a deadline."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from enginehouse_testing.matrix.combination import Combination, Planned, Setting
from enginehouse_testing.matrix.row import MatrixRow, error_of, failed, ran

RUN_SECONDS = 1800.0
"""Longest time a run may take. Every call in the run has its own deadline, with an error that says more."""
ENDING_SECONDS = 7.0
"""Longest time in which an interrupted run may end by itself."""


def run(
    combination: Combination,
    setting: Setting,
    planned: Planned,
    config: Path,
    log: Path,
    standing: Mapping[str, Mapping[str, str]],
) -> MatrixRow:
    """Make a run of the shared `config`, with its output in `log`, and return its row even if the run fails."""
    directory = planned.plan.run_directory
    begun = datetime.now(UTC)
    facts: dict[str, Any] = {
        "standing": standing,
        "busy_cores": busy_cores(),
        "begun": begun.isoformat(timespec="seconds"),
    }
    clock = time.monotonic()
    code = _run([str(config), *planned.overrides], log)
    facts["seconds"] = round(time.monotonic() - clock, 1)
    if code is None:
        return failed(combination, setting, planned, f"it did not end within {RUN_SECONDS:g} s", **facts)
    if code:
        return failed(combination, setting, planned, shortened(error_of(directory, log, begun.timestamp())), **facts)
    return ran(combination, setting, planned, directory, **facts)


def busy_cores(seconds: float = 1.0) -> float:
    """Return the number of cores that other programs keep busy, measured while this process does nothing."""
    return round(psutil.cpu_percent(seconds) / 100 * (os.cpu_count() or 1), 2)


def shortened(text: str) -> str:
    """Replace the paths of this directory, this Python and the user's home in a text by short names such as `~`."""
    for path, short in ((Path.cwd(), "."), (Path(sys.prefix), "$VIRTUAL_ENV"), (Path.home(), "~")):
        if path != Path(path.anchor):
            text = text.replace(str(path), short)
    return text


def _run(arguments: Sequence[str], log: Path) -> int | None:
    """Run `enginehouse train`, and return its exit code, or None if it took too long and was killed.

    The run leads its own session, so that Ctrl-C reaches it only once, from this process.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-P", "-m", "enginehouse.cli.main", "train", *arguments]
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return process.wait(RUN_SECONDS)
        except subprocess.TimeoutExpired:
            return None
        except BaseException:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(ENDING_SECONDS)
            raise
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the processes of a run that has not ended."""
    if process.poll() is not None:
        return
    leader = psutil.Process(process.pid)
    for running in (*leader.children(recursive=True), leader):
        with contextlib.suppress(psutil.Error):
            running.kill()
    process.wait()
