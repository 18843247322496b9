"""Commands whose every process, daemons included, is found and ended by a mark in its environment."""

import contextlib
import os
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

MARK = "ENGINEHOUSE_TEST_COMMAND"


class Marked:
    """Runs commands under a mark that all they start inherits; at the end kills what is left of them.

    Args:
        cwd: current directory of the commands.
        env: environment variables beside this process's; its own `RAY_` and `ENGINEHOUSE_` ones are left out.
    """

    def __init__(self, cwd: Path, env: Mapping[str, str] | None = None):
        self._cwd = cwd
        self._mark = uuid.uuid4().hex
        own = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "ENGINEHOUSE_"))}
        self._env = {**own, **(env or {}), MARK: self._mark}

    def run(self, command: Sequence[str | Path], output: Path, seconds: float) -> int:
        """Run a command to its end and return its exit code. Its output goes to a file, which daemons may keep open.

        Raises:
            AssertionError: it did not end within `seconds`; the message has what it said.
        """
        with output.open("w") as file:
            process = subprocess.Popen(
                command, cwd=self._cwd, env=self._env, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
            )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"did not end within {seconds:g} s:\n{output.read_text()}") from None

    def processes(self) -> list[psutil.Process]:
        """All that runs under the mark."""
        return processes_with(MARK, self._mark)

    def kill(self) -> None:
        """End all of it; what one of them starts meanwhile is found in the next round."""
        while found := self.processes():
            for process in found:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(found, timeout=10)


def processes_with(name: str, value: str) -> list[psutil.Process]:
    """All processes alive with this environment variable, wherever they hang in the process tree."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(name) == value and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
