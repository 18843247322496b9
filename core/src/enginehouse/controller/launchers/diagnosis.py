"""Finds out why a call failed: the rank, its error, and the state of late ranks.

It runs only after a failure or a passed deadline. Every step has its own time limit.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from enginehouse.controller.errors import RemoteError, RemoteTraceback, WorkerDied, WorkerError, WorkerTimeout
from enginehouse.controller.launchers.failure import CallSite, SourceDied, WorkerFailure, cut_off_error, quote_log
from enginehouse.controller.launchers.host import STACKS_SIGNAL
from enginehouse.controller.launchers.interface import WorkerPlace
from enginehouse.controller.ray_access import is_alive

CONTROL_SECONDS = 2.0
"""Time limit for a process to answer on its control lane."""
PROGRESS_SECONDS = 5.0
"""Time limit in seconds for a process to report its last progress. It is longer than `CONTROL_SECONDS`, because a busy
process that does not answer in time counts as hanging, and its call fails."""
MOST_CHARACTERS = 600
"""Maximum length of Ray's text about a dead process in a message. The error's cause has the whole text."""
LOG_LINES = 20
LOG_TAIL_BYTES = 32 * 1024

_RAISED = re.compile(r"^[\w.]*(?:Error|Exception|Exit|Interrupt)\b", re.MULTILINE)
"""Pattern of the line of a traceback that begins with the exception's class."""


@dataclass(kw_only=True, eq=False)
class Diagnosis:
    """A failed or late call, and the search for the cause.

    Attributes:
        timeout: time limit of the call in seconds.
        refs: object reference of the result of each called rank.
        local: processes on this node, by rank.
        ended: the reason why the processes were ended on purpose; None if they were not.
        put_off: True if the deadline was postponed because ranks made progress.
        deadly: True once a process was found dead.
        only_slow: True once a late call has ended on every rank, but its outputs have not arrived.
    """

    role: str
    method: str
    timeout: float
    refs: Mapping[int, Any]
    places: Sequence[WorkerPlace]
    actors: Sequence[Any]
    local: Mapping[int, psutil.Process]
    ended: str | None = None
    put_off: bool = False
    deadly: bool = field(default=False, init=False)
    only_slow: bool = field(default=False, init=False)

    def failed(self, error: Exception) -> WorkerError:
        """Return the error of a rank that died, if any did, and otherwise the error of the rank that raised first."""
        raised, deaths = self._outcomes()
        if self.ended is None:
            deaths |= self._deaths([r for r in self.refs if r not in deaths and (r in raised or len(self.refs) > 1)])
        else:  # an orderly end of a process cancels the calls on its event loop
            cancelled = CancelledError.__name__
            deaths |= {rank: failure.text for rank, failure in raised.items() if failure.type_name == cancelled}
        if deaths:
            return self._died(deaths, raised)
        if not raised:
            return self._unexplained(error)
        first = min(raised, key=lambda rank: raised[rank].at)
        later_ranks = sorted(rank for rank in raised if rank != first)
        notes = [f"Rank(s) {', '.join(map(str, later_ranks))} raised as well."] if later_ranks else []
        if busy := self.unfinished():
            notes.append(f"Rank(s) {', '.join(map(str, busy))} had not ended.")
        if isinstance(raised[first], SourceDied):
            notes = [f"Its output was an argument of {self.role}.{self.method}."]
        return raised[first].to_error(" ".join(notes))

    def late(self) -> WorkerError:
        """Return the error of a call whose deadline passed. It describes a dead rank if there is one, and otherwise
        contains the stacks of the late ranks."""
        raised, deaths = self._outcomes()
        late = self.unfinished()
        # late ranks may wait for a rank that ended its call and then died, maybe with its node
        deaths |= self._deaths([rank for rank in self.refs if rank not in deaths])
        if deaths:
            return self._died(deaths, raised)
        stacks, log_lines = self._stacks(late)
        rank = late[0] if late else next(iter(self.refs))
        self.only_slow = not late
        ended = sorted(set(self.refs) - set(late))
        did = "made no progress for" if self.put_off else "did not end within"
        site = self._site(rank)
        message = f"{site}: {self.method!r} {did} {self.timeout:g} s"
        if self.only_slow:
            message = f"{self.role}: {self.method!r} ended on every rank, but its outputs did not arrive here in time"
        elif len(self.refs) > 1:
            message += f"; late rank(s): {', '.join(map(str, late))}, ended: {', '.join(map(str, ended)) or 'none'}"
        for late_rank in late[:4]:
            message += (
                f"\nRank {late_rank} (pid {self.places[late_rank].pid}) is here:\n{_working_threads(stacks[late_rank])}"
            )
        lines = log_lines.get(rank, ())
        error = WorkerTimeout(message + quote_log(lines), **site._asdict(), log_lines=lines)
        error.seconds = self.timeout
        error.stacks = stacks
        return error

    def unfinished(self) -> list[int]:
        """Return the ranks that have neither returned nor raised."""
        import ray

        refs = list(self.refs.values())
        _, busy = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)
        return [rank for rank, ref in self.refs.items() if ref in busy]

    def idle_seconds(self) -> float:
        """Return the seconds since any of the unfinished ranks last made progress; infinite if none reports progress.

        So the result is small as long as one rank makes progress, even if the other ranks hang.
        """
        import ray

        asked = [self.actors[rank].idle_seconds.remote() for rank in self.unfinished()]
        seconds = [float("inf")]
        if asked:
            ray.wait(asked, num_returns=len(asked), timeout=PROGRESS_SECONDS)
        for ref in asked:
            with suppress(Exception):  # the worker is stuck or dead
                seconds.append(ray.get(ref, timeout=0))
        return min(seconds)

    def _outcomes(self) -> tuple[dict[int, WorkerFailure], dict[int, str]]:
        """Return the errors that ranks raised, and the causes of death of dead ranks, both by rank."""
        import ray

        raised: dict[int, WorkerFailure] = {}
        deaths: dict[int, str] = {}
        refs = list(self.refs.values())
        ended, _ = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)
        until = time.monotonic() + CONTROL_SECONDS
        for rank, ref in self.refs.items():
            if ref not in ended:
                continue
            try:
                ray.get(ref, timeout=max(until - time.monotonic(), 0.0))
            except ray.exceptions.RayTaskError as error:
                raised[rank] = self._failure_in(error, rank)
            except (
                ray.exceptions.RayActorError,
                ray.exceptions.WorkerCrashedError,
                ray.exceptions.NodeDiedError,
                ray.exceptions.OutOfMemoryError,
            ) as error:
                deaths[rank] = str(error)
            except ray.exceptions.GetTimeoutError:  # the call ended, but its output has not arrived
                continue
            except Exception as error:
                raised[rank] = self._failure_here(error, rank)
        return raised, deaths

    def _failure_in(self, error: Any, rank: int) -> WorkerFailure:
        if isinstance(error.cause, SourceDied):
            error.cause.text = describe_death(error.cause.text)
        if isinstance(error.cause, WorkerFailure):
            return error.cause
        # raised by Ray in the worker: arguments do not unpickle, or a result does not pickle
        cause = error.cause if isinstance(error.cause, BaseException) else error
        return WorkerFailure(self._site(rank), type(cause).__qualname__, str(cause), str(error))

    def _failure_here(self, error: Exception, rank: int) -> WorkerFailure:
        failure = WorkerFailure.pack(error, self._site(rank))
        failure.text = f"its result could not be read here: {failure.text}"
        return failure

    def _deaths(self, ranks: Sequence[int]) -> dict[int, str]:
        """Return the causes of death of those `ranks` that are dead. Processes on other nodes are asked on their
        control lanes."""
        import ray

        asked = {rank: self.actors[rank].ping.remote() for rank in ranks if rank not in self.local}
        deaths = {rank: "the process is gone" for rank in ranks if rank not in asked and not is_alive(self.local[rank])}
        if asked:
            ray.wait(list(asked.values()), num_returns=len(asked), timeout=CONTROL_SECONDS)
        for rank, ref in asked.items():
            try:
                ray.get(ref, timeout=0)
            except ray.exceptions.RayActorError as error:
                deaths[rank] = str(error)
            except Exception:  # the worker is busy, or does not answer for another reason
                continue
        return deaths

    def _stacks(self, ranks: Sequence[int]) -> tuple[dict[int, str], dict[int, tuple[str, ...]]]:
        import ray

        asked = {rank: self.actors[rank].stacks.remote() for rank in ranks}
        if asked:
            ray.wait(list(asked.values()), num_returns=len(asked), timeout=CONTROL_SECONDS)
        stacks: dict[int, str] = {}
        lines: dict[int, tuple[str, ...]] = {}
        for rank, ref in asked.items():
            try:
                stacks[rank], lines[rank] = ray.get(ref, timeout=0)
            except Exception:
                stacks[rank] = self._stacks_from_outside(rank)
        return stacks, lines

    def _stacks_from_outside(self, rank: int) -> str:
        """Read the stacks of a process that is stopped, or whose native code holds the interpreter lock."""
        process = self.local.get(rank)
        if process is None:
            return f"  it did not answer within {CONTROL_SECONDS:g} s; it is on node {self.places[rank].node}"
        status, stacks = "gone", ""
        with suppress(psutil.Error):
            status = process.status()
        if status != psutil.STATUS_STOPPED:
            stacks = _faulthandler_stacks(self.places[rank]) or _py_spy_stacks(process.pid)
        return stacks or f"  it did not answer within {CONTROL_SECONDS:g} s; its process is {status}"

    def _died(self, deaths: Mapping[int, str], raised: Mapping[int, WorkerFailure]) -> WorkerDied:
        self.deadly = True
        rank = min(deaths)
        text, site = deaths[rank], self._site(rank)
        if self.ended is not None:
            return cut_off_error(self.ended, site)
        lines = _log_tail(self.places[rank])
        message = f"{site}: the process died during {self.method!r}: {describe_death(text)}"
        for peer, failure in raised.items():
            if peer != rank:
                message += f"\nThen rank {peer} raised {failure.type_name}: {failure.text}"
        error = WorkerDied(message + quote_log(lines), **site._asdict(), log_lines=lines)
        if len(text) > MOST_CHARACTERS:
            error.__cause__ = RemoteTraceback(text)
        return error

    def _unexplained(self, seen: Exception) -> RemoteError:
        rank = next(iter(self.refs))
        message = f"{self.role} ({self.places[rank].node}): {self.method!r} failed: {type(seen).__name__}: {seen}"
        error = RemoteError(message, **self._site(rank)._asdict())
        error.cause = seen
        error.type_name = type(seen).__qualname__
        error.__cause__ = RemoteTraceback(str(seen))
        return error

    def _site(self, rank: int) -> CallSite:
        place = self.places[rank]
        return CallSite(self.role, rank, place.node, place.pid, self.method)


def _working_threads(stacks: str) -> str:
    """Return the stacks of a process up to the first idle thread."""
    lines: list[str] = []
    for line in stacks.splitlines():
        idle = line.startswith("thread ") and not line.startswith("thread running")
        if idle and lines:
            break
        lines.append(line)
    return "\n".join(lines)


def describe_death(text: str) -> str:
    """Shorten Ray's text about a dead process: drop its advice, and keep the exception at the end of a traceback."""
    text = text.split("Some common causes", 1)[0].strip()
    words = " ".join(text.split())
    if "is temporarily unavailable:" in words:  # Ray's text for a while after the other end has gone
        words = words.split("is temporarily unavailable:", 1)[1].split(" The task may or may not", 1)[0].strip()
        return f"the connection to the process broke; maybe its node has failed: {words}"[:MOST_CHARACTERS]
    for start in ("Worker exit detail:", "The actor is dead because", "The actor died because"):
        if start in words:
            words = words.split(start, 1)[1].strip()
            break
    if len(words) <= MOST_CHARACTERS:
        return words
    raised = [match.start() for match in _RAISED.finditer(text)] or [text.rfind("\n") + 1]
    return f"{words[: MOST_CHARACTERS // 3]} ... {' '.join(text[raised[-1] :].split())[: MOST_CHARACTERS * 2 // 3]}"


def _log_tail(place: WorkerPlace) -> tuple[str, ...]:
    """Return the last lines of a worker's log files, if they are on this machine."""
    for path in place.log_files:
        try:
            with open(path, "rb") as file:
                file.seek(max(os.path.getsize(path) - LOG_TAIL_BYTES, 0))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            continue
        lines = [line for line in lines if line.strip() and not line.startswith(":")]
        if lines:
            return tuple(lines[-LOG_LINES:])
    return ()


def _faulthandler_stacks(place: WorkerPlace) -> str:
    """Let a process write its stacks into its log, and read them. `faulthandler` needs no interpreter lock."""
    if STACKS_SIGNAL is None or not place.log_files:
        return ""
    log_file = Path(place.log_files[0])
    try:
        before = size = log_file.stat().st_size
        os.kill(place.pid, STACKS_SIGNAL)
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            time.sleep(0.05)
            grown = log_file.stat().st_size
            if grown > before and grown == size:
                break
            size = grown
        with log_file.open("rb") as file:
            file.seek(before)
            blocks = file.read(LOG_TAIL_BYTES).decode(errors="replace").strip().split("\n\n")
    except OSError:
        return ""
    return "\n".join(block for block in blocks if "<no Python frame>" not in block)  # else Ray's thread


def _py_spy_stacks(pid: int) -> str:
    """Return the stacks that py-spy prints; empty if py-spy is not installed or not permitted to read the process."""
    program = shutil.which("py-spy")
    if program is None:
        return ""
    command = [program, "dump", "--pid", str(pid)]
    try:
        dump = subprocess.run(command, capture_output=True, text=True, timeout=5.0, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return dump.stdout.rstrip() if dump.returncode == 0 else ""
