"""Finding out what became of a call that failed: which rank, why, and what the late ones are doing.

Started only when a call has failed; every step here has a deadline of its own.
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
from pathlib import Path
from typing import Any

import psutil

from enginehouse.controller.errors import RemoteError, RemoteTraceback, WorkerDied, WorkerError, WorkerTimeout
from enginehouse.controller.launchers.failure import SourceDied, WorkerFailure, cut_off_error
from enginehouse.controller.launchers.host import STACKS_SIGNAL
from enginehouse.controller.launchers.interface import WorkerPlace

CONTROL_SECONDS = 2.0
"""How long a process gets to answer on its control lane."""
PROGRESS_SECONDS = 5.0
"""How long it gets to say whether it got on: it may be busy, and without an answer its call has failed."""
MOST_SAID = 600
"""Characters of Ray's text of a death in a message; the whole of a longer one is behind the error."""
LOG_LINES = 20
LOG_TAIL_BYTES = 32 * 1024

_RAISED = re.compile(r"^[\w.]*(?:Error|Exception|Exit|Interrupt)\b", re.MULTILINE)
"""How the last lines of a traceback begin."""


class Diagnosis:
    """One failed call.

    Args:
        role: the group's name.
        method: the method called.
        timeout: the call's deadline, seconds.
        refs: the result of each rank that was called.
        places: every rank's place.
        actors: every rank's actor.
        local: the processes on this node, by rank.
        ended: why they were ended on purpose, if they were.
        put_off: whether the deadline was put off, as ranks got on.

    Attributes:
        deadly: whether a process was found dead.
        only_slow: whether a late call was found ended on every rank, its outputs not here yet.
    """

    def __init__(
        self,
        *,
        role: str,
        method: str,
        timeout: float,
        refs: Mapping[int, Any],
        places: Sequence[WorkerPlace],
        actors: Sequence[Any],
        local: Mapping[int, psutil.Process],
        ended: str | None = None,
        put_off: bool = False,
    ):
        self.role = role
        self.method = method
        self.timeout = timeout
        self.deadly = False
        self.only_slow = False
        self._refs = refs
        self._places = places
        self._actors = actors
        self._local = local
        self._ended = ended
        self._put_off = put_off

    def failed(self, seen: Exception) -> WorkerError:
        """The error to raise: of a rank that died if any did, else of the rank that raised first."""
        raised, deaths = self._outcomes()
        if self._ended is None:
            deaths |= self._deaths([r for r in self._refs if r not in deaths and (r in raised or len(self._refs) > 1)])
        else:  # what ran on an event loop was cancelled as its process ended in order
            deaths |= {rank: one.text for rank, one in raised.items() if one.type_name == CancelledError.__name__}
        if deaths:
            self.deadly = True
            rank = min(deaths)
            return self._died(rank, deaths[rank], raised)
        if not raised:
            return self._unexplained(seen)
        first = min(raised, key=lambda rank: raised[rank].at)
        others = sorted(rank for rank in raised if rank != first)
        notes = [f"Rank(s) {', '.join(map(str, others))} raised as well."] if others else []
        if busy := self.unfinished():
            notes.append(f"Rank(s) {', '.join(map(str, busy))} had not ended.")
        if isinstance(raised[first], SourceDied):
            notes = [f"Its output was an argument of {self.role}.{self.method}."]
        return raised[first].to_error(" ".join(notes))

    def late(self) -> WorkerError:
        """The error of a call whose deadline passed: a death where there is one, else who is late and what it does."""
        raised, deaths = self._outcomes()
        late = self.unfinished()
        # one that ended and died since, maybe with its node, can be what the late ones wait for
        deaths |= self._deaths([rank for rank in self._refs if rank not in deaths])
        if deaths:
            self.deadly = True
            rank = min(deaths)
            return self._died(rank, deaths[rank], raised)
        stacks, log_lines = self._stacks(late)
        rank = late[0] if late else next(iter(self._refs))
        self.only_slow = not late
        ended = sorted(set(self._refs) - set(late))
        did = "made no progress for" if self._put_off else "did not end within"
        message = f"{self._where(rank)}: {self.method!r} {did} {self.timeout:g} s"
        if self.only_slow:
            message = f"{self.role}: {self.method!r} ended on every rank, but its outputs did not get here in time"
        elif len(self._refs) > 1:
            message += f"; late rank(s): {_listed(late)}, ended: {_listed(ended) or 'none'}"
        for one in late[:4]:
            message += f"\nRank {one} (pid {self._places[one].pid}) is here:\n{_at_work(stacks[one])}"
        lines = log_lines.get(rank, ())
        error = WorkerTimeout(message + _quoted(lines), **self._facts(rank), log_lines=lines)
        error.seconds = self.timeout
        error.stacks = stacks
        return error

    def unfinished(self) -> list[int]:
        """Ranks that neither returned nor raised yet."""
        import ray

        refs = list(self._refs.values())
        _, busy = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)
        return [rank for rank, ref in self._refs.items() if ref in busy]

    def idle_seconds(self) -> float:
        """How long ago a rank that neither returned nor raised got on; infinite where none did, or says so."""
        import ray

        asked = [self._actors[rank].idle_seconds.remote() for rank in self.unfinished()]
        found = [float("inf")]
        if asked:
            ray.wait(asked, num_returns=len(asked), timeout=PROGRESS_SECONDS)
        for ref in asked:
            with suppress(Exception):  # it is stuck, or gone
                found.append(ray.get(ref, timeout=0))
        return min(found)

    # What Ray knows

    def _outcomes(self) -> tuple[dict[int, WorkerFailure], dict[int, str]]:
        """Of the ranks that ended: which raised, and which are dead and how."""
        import ray

        raised: dict[int, WorkerFailure] = {}
        deaths: dict[int, str] = {}
        refs = list(self._refs.values())
        ended, _ = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)
        until = time.monotonic() + CONTROL_SECONDS
        for rank, ref in self._refs.items():
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
                ray.exceptions.OutOfMemoryError,  # Ray killed it
            ) as error:
                deaths[rank] = str(error)
            except ray.exceptions.GetTimeoutError:  # it ended, and its output is on its way
                continue
            except Exception as error:
                raised[rank] = self._failure_here(error, rank)
        return raised, deaths

    def _failure_in(self, error: Any, rank: int) -> WorkerFailure:
        if isinstance(error.cause, SourceDied):
            error.cause.text = describe_death(error.cause.text)
        if isinstance(error.cause, WorkerFailure):
            return error.cause
        # raised by Ray itself in the worker: arguments that do not unpickle, a result that does not pickle
        place = self._places[rank]
        cause = error.cause if isinstance(error.cause, BaseException) else error
        return WorkerFailure(
            self.role, rank, place.node, place.pid, self.method, type(cause).__qualname__, str(cause),
            str(error), None, (), time.time(),
        )  # fmt: skip

    def _failure_here(self, error: Exception, rank: int) -> WorkerFailure:
        place = self._places[rank]
        failure = WorkerFailure.of(error, self.role, rank, place.node, place.pid, self.method, ())
        failure.text = f"its result could not be read here: {failure.text}"
        return failure

    # What the processes say

    def _deaths(self, ranks: Sequence[int]) -> dict[int, str]:
        """Which of `ranks` died, and how. Looks at processes of this node; asks all others' at once, on their control
        lanes."""
        import ray

        asked = {rank: self._actors[rank].ping.remote() for rank in ranks if rank not in self._local}
        deaths = {rank: "the process is gone" for rank in ranks if rank not in asked and _is_gone(self._local[rank])}
        if asked:
            ray.wait(list(asked.values()), num_returns=len(asked), timeout=CONTROL_SECONDS)
        for rank, ref in asked.items():
            try:
                ray.get(ref, timeout=0)
            except ray.exceptions.RayActorError as error:
                deaths[rank] = str(error)
            except Exception:  # it is busy, or does not answer for another reason
                continue
        return deaths

    def _stacks(self, ranks: Sequence[int]) -> tuple[dict[int, str], dict[int, tuple[str, ...]]]:
        """Ask all of `ranks` at once for their stacks and log lines."""
        import ray

        asked = {rank: self._actors[rank].stacks.remote() for rank in ranks}
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
        """The stacks of a process that does not answer: native code holds the interpreter lock, or it is stopped."""
        process = self._local.get(rank)
        if process is None:
            return f"  it did not answer within {CONTROL_SECONDS:g} s; it is on node {self._places[rank].node}"
        status: str
        try:
            status = process.status()
        except psutil.Error:
            status = "gone"
        found = ""
        if status != psutil.STATUS_STOPPED:
            found = _faulthandler_stacks(self._places[rank]) or _py_spy_stacks(process.pid)
        return found or f"  it did not answer within {CONTROL_SECONDS:g} s; its process is {status}"

    # Saying it

    def _died(self, rank: int, text: str, raised: Mapping[int, WorkerFailure]) -> WorkerDied:
        if self._ended is not None:
            return cut_off_error(self._ended, **self._facts(rank))
        lines = _log_tail(self._places[rank])
        message = f"{self._where(rank)}: the process died during {self.method!r}: {describe_death(text)}"
        for other, failure in raised.items():
            if other != rank:
                message += f"\nThen rank {other} raised {failure.type_name}: {failure.text}"
        error = WorkerDied(message + _quoted(lines), **self._facts(rank), log_lines=lines)
        if len(text) > MOST_SAID:
            error.__cause__ = RemoteTraceback(text)
        return error

    def _unexplained(self, seen: Exception) -> RemoteError:
        rank = next(iter(self._refs))
        message = f"{self.role} ({self._places[rank].node}): {self.method!r} failed: {type(seen).__name__}: {seen}"
        error = RemoteError(message, **self._facts(rank))
        error.cause = seen
        error.type_name = type(seen).__qualname__
        error.__cause__ = RemoteTraceback(str(seen))
        return error

    def _where(self, rank: int) -> str:
        place = self._places[rank]
        return f"{self.role} rank {rank} (node {place.node}, pid {place.pid})"

    def _facts(self, rank: int) -> dict[str, Any]:
        place = self._places[rank]
        return {"role": self.role, "rank": rank, "node": place.node, "pid": place.pid, "method": self.method}


def _is_gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return True


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _quoted(lines: Sequence[str]) -> str:
    return "\n" + "\n".join(["Its last log lines:", *(f"  {line}" for line in lines)]) if lines else ""


def _at_work(stacks: str) -> str:
    """Of a process's stacks, those at work: the first blocks, up to the idle threads'."""
    kept: list[str] = []
    for line in stacks.splitlines():
        idle = line.startswith("thread ") and not line.startswith("thread running")
        if idle and kept:
            break
        kept.append(line)
    return "\n".join(kept)


def describe_death(text: str) -> str:
    """Return in short what Ray says of a death, without its advice: of a traceback the exception at its end, too."""
    text = text.split("Some common causes", 1)[0].strip()
    said = " ".join(text.split())
    if "is temporarily unavailable:" in said:  # what a connection looks like whose other end is gone, for a while
        said = said.split("is temporarily unavailable:", 1)[1].split(" The task may or may not", 1)[0].strip()
        return f"the connection to it broke, maybe with its node: {said}"[:MOST_SAID]
    for start in ("Worker exit detail:", "The actor is dead because", "The actor died because"):
        if start in said:
            said = said.split(start, 1)[1].strip()
            break
    if len(said) <= MOST_SAID:
        return said
    raised = [match.start() for match in _RAISED.finditer(text)] or [text.rfind("\n") + 1]
    return f"{said[: MOST_SAID // 3]} ... {' '.join(text[raised[-1] :].split())[: MOST_SAID * 2 // 3]}"


def _log_tail(place: WorkerPlace) -> tuple[str, ...]:
    """The last lines of a worker's log files, where they are on this machine."""
    for path in place.log_files:
        try:
            with open(path, "rb") as file:
                file.seek(max(os.path.getsize(path) - LOG_TAIL_BYTES, 0))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            continue
        lines = [line for line in lines if line.strip() and not line.startswith(":")]  # ":actor_name:" marks are Ray's
        if lines:
            return tuple(lines[-LOG_LINES:])
    return ()


def _faulthandler_stacks(place: WorkerPlace) -> str:
    """Make the process write its stacks into its log (`faulthandler` needs no interpreter lock); read them there."""
    if STACKS_SIGNAL is None or not place.log_files:
        return ""
    log_file = Path(place.log_files[0])
    try:
        before = log_file.stat().st_size
        os.kill(place.pid, STACKS_SIGNAL)
        size = before
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            time.sleep(0.05)
            grown = log_file.stat().st_size
            if grown > before and grown == size:
                break
            size = grown
        with log_file.open("rb") as file:
            file.seek(before)
            return _with_python_frames(file.read(LOG_TAIL_BYTES).decode(errors="replace"))
    except OSError:
        return ""


def _with_python_frames(dump: str) -> str:
    """Of what `faulthandler` wrote, the threads that run Python: Ray's own threads do not."""
    blocks = dump.strip().split("\n\n")
    return "\n".join(block for block in blocks if "<no Python frame>" not in block)


def _py_spy_stacks(pid: int) -> str:
    """Ask py-spy, where it is installed and allowed to look."""
    program = shutil.which("py-spy")
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, "dump", "--pid", str(pid)], capture_output=True, text=True, timeout=5.0, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.rstrip() if done.returncode == 0 else ""
