"""Runs one combination as a user would: `enginehouse train` in a process of its own, with a deadline."""

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
from enginehouse_testing.matrix.row import Row, error_of, failed, ran

RUN_SECONDS = 1800.0
"""Longest time a run may take; every call in it has a deadline of its own, which says more."""
ENDING_SECONDS = 7.0
"""How long an interrupted run may take to end in order."""


def run(
    combination: Combination,
    setting: Setting,
    planned: Planned,
    config: Path,
    log: Path,
    standing: Mapping[str, Mapping[str, str]],
) -> Row:
    """Make a run, and read what it found; never raises for what the run does.

    Args:
        combination: what is combined.
        setting: how long and how wide.
        planned: the combination, planned.
        config: the shared config.
        log: where what it says goes.
        standing: versions it is made with, by kind.
    """
    directory = planned.plan.run_directory
    began = datetime.now(UTC)
    began_at = began.isoformat(timespec="seconds")
    facts: dict[str, Any] = {"standing": standing, "busy_cores": busy_cores(), "begun": began_at}
    begun = time.monotonic()
    ended = _run([str(config), *planned.overrides], log)
    facts["seconds"] = round(time.monotonic() - begun, 1)
    if ended is None:
        return failed(combination, setting, planned, f"it did not end within {RUN_SECONDS:g} s", **facts)
    if ended:
        return failed(combination, setting, planned, shortened(error_of(directory, log, began.timestamp())), **facts)
    return ran(combination, setting, planned, directory, **facts)


def busy_cores(seconds: float = 1.0) -> float:
    """Cores that others keep busy, measured while this process does nothing."""
    return round(psutil.cpu_percent(seconds) / 100 * (os.cpu_count() or 1), 2)


def shortened(text: str) -> str:
    """Text without what is only true here: the paths of this directory, this Python and the user's home."""
    for path, short in ((Path.cwd(), "."), (Path(sys.prefix), "$VIRTUAL_ENV"), (Path.home(), "~")):
        if path != Path(path.anchor):
            text = text.replace(str(path), short)
    return text


def _run(arguments: Sequence[str], log: Path) -> int | None:
    """Run `enginehouse train`; returns its exit code, None if it had to be killed for taking too long.

    It leads a session of its own, so that Ctrl-C reaches it once, from here.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-P", "-m", "enginehouse.cli.main", "train", *arguments]
    with log.open("w", encoding="utf-8") as said:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
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
    """Kill what is left of a run that has not ended."""
    if process.poll() is not None:
        return
    itself = psutil.Process(process.pid)
    for one in (*itself.children(recursive=True), itself):
        with contextlib.suppress(psutil.Error):
            one.kill()
    process.wait()
