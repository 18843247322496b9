"""The note beside a runtime that is being made. It holds process id and start time of the process that makes it.

Other processes that wait for the runtime show the note. If the maker was killed, the next maker ends the command that
the killed maker left running.
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
"""Time in seconds that a process has to end after a signal, before it gets a stronger signal."""


@dataclass(frozen=True, slots=True)
class RuntimeMaker:
    """A process that makes a runtime.

    Attributes:
        since: time at which the process began to make the runtime, in seconds since the epoch.
        step: process id of its current command, which is also the id of the command's process group; 0: no command.
        step_created: creation time of the command's process. It identifies the process, because a later process may
            have the same id.
    """

    pid: int
    since: float
    step: int = 0
    step_created: float = 0.0

    def __str__(self) -> str:
        since = time.strftime("%H:%M:%S", time.localtime(self.since))
        return f"process {self.pid}, which has been making this runtime since {since}"


def note_maker(name: str, since: float, step: int = 0) -> None:
    """Write the note that this process makes the runtime `name`, by the command with process id `step`."""
    import psutil

    created = 0.0
    if step:
        with suppress(psutil.Error):  # the command may have ended already
            created = psutil.Process(step).create_time()
    path = _path(name)
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(asdict(RuntimeMaker(os.getpid(), since, step, created))))
    os.replace(draft, path)


def read_maker(name: str) -> RuntimeMaker | None:
    """Return the maker in the note of the runtime `name`; None if there is no note."""
    try:
        return RuntimeMaker(**json.loads(_path(name).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def forget_maker(name: str) -> None:
    _path(name).unlink(missing_ok=True)


def end_left_step(name: str) -> None:
    """End the command of a killed maker, and all its children. Only the next maker may call this."""
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
