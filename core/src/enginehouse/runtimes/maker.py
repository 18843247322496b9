"""The note that a process leaves beside the runtime it makes: who makes it, since when, and in which process.

Others that wait for the runtime say so; and where the maker was killed, the next one ends what it left running.
"""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from enginehouse.runtimes.store import runtimes_folder

END_SECONDS = 10.0
"""Time a process gets to end after a signal, before the next, harder one."""


@dataclass(frozen=True, slots=True)
class RuntimeMaker:
    """A process that makes a runtime.

    Attributes:
        pid: its process id.
        since: time of its start, in seconds since the epoch.
        step: process id of the command it runs; it leads its own process group. 0: none.
        step_created: creation time of that process in the system's words, because another may have the same id later.
    """

    pid: int
    since: float
    step: int = 0
    step_created: float = 0.0

    def __str__(self) -> str:
        since = time.strftime("%H:%M:%S", time.localtime(self.since))
        return f"process {self.pid}, which has been making it since {since}"


def note_maker(name: str, since: float, step: int = 0) -> None:
    """Note that this process makes the runtime of a name, by the command with process id `step`."""
    import psutil

    created = 0.0
    if step:
        with suppress(psutil.Error):  # it may have ended already
            created = psutil.Process(step).create_time()
    path = _path(name)
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(asdict(RuntimeMaker(os.getpid(), since, step, created))))
    os.replace(draft, path)


def read_maker(name: str) -> RuntimeMaker | None:
    """Return the maker that noted itself for the runtime of a name, if any."""
    try:
        return RuntimeMaker(**json.loads(_path(name).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def forget_maker(name: str) -> None:
    """Remove the note, because the making is over."""
    _path(name).unlink(missing_ok=True)


def end_left_step(name: str) -> None:
    """End the command of a maker that was killed, with all it started; only the next maker may call this."""
    import psutil

    maker = read_maker(name)
    if maker is None or not maker.step:
        return
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(maker.step)
        if abs(process.create_time() - maker.step_created) > 1.0:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with suppress(psutil.TimeoutExpired):
                process.wait(END_SECONDS)


def _path(name: str) -> Path:
    return runtimes_folder() / f".{name}.maker.json"
