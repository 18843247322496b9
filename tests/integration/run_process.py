"""A run started as a user starts it: the `enginehouse` command in a process of its own, watched from outside.

Everything it starts carries a mark in its environment (Ray's processes and the workers inherit it), so that what is
left over is found wherever it hangs in the process tree.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import psutil

from .marked import processes_with

MARK = "ENGINEHOUSE_TEST_RUN"
COMMAND = Path(sys.executable).with_name("enginehouse")

PATIENCE_SECONDS = 240.0
"""Longest wait for anything a run does; a busy machine must not fail a test, a hanging run must."""
AFTERMATH_SECONDS = 30.0
"""How long after its end a run's last processes may take to vanish, however it ended: less than a second on a quiet
machine, and half of what Ray's agents would take that nobody ends."""

T = TypeVar("T")


class Ended(NamedTuple):
    """How a command ended and what it said."""

    code: int
    out: str
    err: str


class RunFiles:
    """What a run wrote.

    Args:
        directory: the run directory.
    """

    def __init__(self, directory: Path):
        self.directory = directory

    @property
    def record(self) -> dict[str, Any]:
        """`run.json`; empty before there is one."""
        path = self.directory / "run.json"
        return json.loads(path.read_text()) if path.exists() else {}

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl`, whole ones."""
        return self._lines("metrics.jsonl")

    @property
    def validations(self) -> list[dict[str, Any]]:
        """The lines of `validation.jsonl`."""
        return self._lines("validation.jsonl")

    def samples(self, step: int) -> list[dict[str, Any]]:
        """What the model said in a step."""
        return self._lines(f"samples/step-{step:06d}.jsonl")

    @property
    def spans(self) -> list[dict[str, Any]]:
        """The spans of `timeline.json`."""
        return [e for e in json.loads((self.directory / "timeline.json").read_text()) if e["ph"] == "X"]

    def pid(self, role: str, rank: int = 0) -> int:
        """Process id of a worker, as the run recorded it."""
        return self.record["roles"][role][rank]["pid"]

    def _lines(self, name: str) -> list[dict[str, Any]]:
        path = self.directory / name
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


class RunProcess(RunFiles):
    """One `enginehouse` command under way.

    It leads a process group of its own, as in a terminal: Ctrl-C reaches every process of the group.

    Args:
        arguments: of the command.
        cwd: current directory.
        directory: the run directory it was told to use.
        logs: where its output goes; files, so that no full pipe ever blocks it.
        env: further environment variables.
        program: that starts the command, where it is not the command itself.
    """

    def __init__(
        self,
        *arguments: str,
        cwd: Path,
        directory: Path,
        logs: Path,
        env: Mapping[str, str] | None = None,
        program: str | Path = COMMAND,
    ):
        super().__init__(directory)
        self._mark = uuid.uuid4().hex
        logs.mkdir(parents=True, exist_ok=True)
        self._out, self._err = logs / f"{self._mark}.out", logs / f"{self._mark}.err"
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "ENGINEHOUSE_"))}
        with self._out.open("w") as out, self._err.open("w") as err:
            self._process = subprocess.Popen(
                [program, *arguments],
                cwd=cwd,
                env={**inherited, MARK: self._mark, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    # Waiting for it

    def until(self, condition: Callable[[], T], what: str, seconds: float = PATIENCE_SECONDS) -> T:
        """Poll until `condition()` holds, and return its value; fail if the run ends or time runs out before."""
        return until(condition, what, seconds, alive=self._still_runs)

    def until_step(self, step: int) -> None:
        """Wait until the metrics of `step` are written."""
        self.until(lambda: len(self.metrics) >= step, f"step {step}")

    def _still_runs(self) -> None:
        if self._process.poll() is not None:
            raise AssertionError(f"the run ended with {self._process.returncode}:\n{self._said()}")

    def finish(self, seconds: float = PATIENCE_SECONDS) -> Ended:
        """Wait for the end, and check that no process is left over."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            said = self._said()
            self.kill()
            raise AssertionError(f"the run did not end within {seconds:g} s:\n{said}") from None
        until(lambda: not self.processes(), "the end of all processes", AFTERMATH_SECONDS, alive=lambda: None, of=self)
        return Ended(self._process.returncode, self._out.read_text(), self._err.read_text())

    def finished(self, seconds: float = PATIENCE_SECONDS) -> Ended:
        """Wait for the end of a run that has to end well."""
        ended = self.finish(seconds)
        assert ended.code == 0, ended.err
        return ended

    def _said(self) -> str:
        return self._out.read_text() + self._err.read_text()

    # Its processes

    def processes(self) -> list[psutil.Process]:
        """All processes of the run that are alive, by their mark."""
        return processes_with(MARK, self._mark)

    def interrupt(self, number: signal.Signals = signal.SIGINT) -> None:
        """Press Ctrl-C: every process of the group gets the signal, as from a terminal; or another signal."""
        os.killpg(self._process.pid, number)

    def signal_itself(self, number: signal.Signals) -> None:
        """Send a signal to the one process that was started."""
        self._process.send_signal(number)

    def signal_ray(self, program: str, number: signal.Signals) -> None:
        """Send a signal to a process of Ray's: `raylet`, `gcs_server`."""
        (process,) = [process for process in self.processes() if process.name() == program]
        process.send_signal(number)

    def kill(self) -> None:
        """End every process of the run; for the end of a test that failed."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()


def finished(run: RunProcess, seconds: float = PATIENCE_SECONDS) -> RunProcess:
    """Wait for the end of a run that has to end well, and return it."""
    run.finished(seconds)
    return run


def until(
    condition: Callable[[], T], what: str, seconds: float, *, alive: Callable[[], None], of: RunProcess | None = None
) -> T:
    """Poll `condition` until it holds, for at most `seconds`; `alive` raises when there is nothing to wait for."""
    deadline = time.monotonic() + seconds
    while True:
        if value := condition():
            return value
        alive()
        if time.monotonic() > deadline:
            left = "".join(f"\n  {p.pid} {' '.join(process_words(p))[:200]}" for p in of.processes()) if of else ""
            raise AssertionError(f"waited {seconds:g} s for {what}{left}")
        time.sleep(0.02)


def process_words(process: psutil.Process) -> list[str]:
    """Its command line; one word at least, also if it is gone by now."""
    try:
        return process.cmdline() or [process.name()]
    except psutil.Error:
        return ["gone"]


def said(run: RunProcess) -> dict[str, list[dict[str, Any]]]:
    """All samples of a run, by file, but for logprobs: their last digit depends on what was computed beside them."""
    files = {path.name: path.read_text().splitlines() for path in (run.directory / "samples").iterdir()}
    rows = {name: [*map(json.loads, lines)] for name, lines in files.items()}
    for row in (row for several in rows.values() for row in several):
        row.get("by_token", {}).pop("logprob", None)
    return rows
