"""Trying a plugin in a process of its own before it is loaded here.

A plugin's module is other people's code that runs in every command: one that ends the process, hangs or raises
`KeyboardInterrupt` would cost everybody. So each is loaded once in a child process, with nothing to print to; what is
found is remembered for the plugin's files, and those that it imports, as they are, in the user's cache.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.machinery import PathFinder, all_suffixes
from pathlib import Path
from typing import Any

from enginehouse import __version__
from enginehouse.plugin.loaded import Plugin

SECONDS = 30.0
"""Longest a plugin may take to be loaded; a light one takes a hundredth of a second."""

START_SECONDS = 60.0
"""Longest the other process may take to begin."""

REMEMBERED_SECONDS = 3600.0
"""How long a bad finding counts: what hung may have hung for want of a disk."""

VARIABLE = "ENGINEHOUSE_PLUGIN_TRIAL"
"""Environment variable of that process, of a run's workers, and of those they start: nothing is tried in them."""

_PROGRAM = """
import json, sys
asked = json.loads(sys.argv[2])
sys.path[:] = asked["path"] or sys.path
from enginehouse.plugin.trial_process import main
main(int(sys.argv[1]), asked["plugins"], asked["seconds"], asked["examiner"], asked["examiner_seconds"])
"""

EXAMINER_SECONDS = 300.0
"""Longest an examiner may take for its next answer: engines take a while to import."""

_SUFFIXES = tuple(all_suffixes())

Candidate = tuple[Plugin, metadata.EntryPoint]


@dataclass(frozen=True, slots=True)
class Examined:
    """What an examination of a plugin in another process brought.

    Attributes:
        loaded: what `enginehouse.plugin.trial_process` says of loading it; empty where it did not come so far.
        answers: those of the examiner, in order.
        problem: what became of the process before it was through, in words; empty where it was.
        output: all that was printed there, stacks of Python included where it hung or crashed.
    """

    loaded: Mapping[str, Any]
    answers: tuple[Mapping[str, Any], ...]
    problem: str
    output: str


def problems(candidates: Sequence[Candidate]) -> list[str]:
    """Why each of some plugins must not be loaded in this process; empty where it may be.

    One that was imported here before is not tried, nor one of which this is known from an earlier process.
    """
    if VARIABLE in os.environ:
        return [""] * len(candidates)
    asked = [_asked(*candidate) for candidate in candidates]
    fresh = [number for number, candidate in enumerate(candidates) if asked[number].unknown(candidate[1])]
    state = functools.cache(_state)  # plugins import much the same
    found = {number: asked[number].remembered(state) for number in range(len(asked))}
    unheard = [number for number in fresh if found[number] is None]
    for number, problem in zip(unheard, _try_out([candidates[number] for number in unheard]), strict=True):
        if problem is not None:
            found[number] = problem
    return [found[number] or "" if number in fresh else "" for number in range(len(asked))]


def _try_out(candidates: Sequence[Candidate]) -> list[str | None]:
    """Load each of some plugins in another process, whatever is known of it, and remember what was found.

    Returns:
        Why each must not be loaded here; empty where it may be, None where no process could be started.
    """
    found: list[str | None] = []
    while len(found) < len(candidates):
        those, problem = _in_one_process(candidates[len(found) :])
        found += those
        if problem is None:
            return [*found, *([None] * (len(candidates) - len(found)))]
        if problem:
            _asked(*candidates[len(found)]).remember(problem)
            found.append(problem)
    return found


def _in_one_process(candidates: Sequence[Candidate]) -> tuple[list[str], str | None]:
    """What was found of the first candidates, and what the next one did to the process: empty where all were tried,
    None where the process did not come to the first."""
    found: list[str] = []
    try:
        with _process(candidates, "") as answer:
            answer(START_SECONDS)
            try:
                while len(found) < len(candidates):
                    said = answer(SECONDS)
                    _asked(*candidates[len(found)]).remember(said["problem"], said["imported"])
                    found.append(said["problem"])
            except _Ended as ended:
                return found, str(ended)
    except (_Ended, OSError):
        return found, None
    return found, ""


def examine(
    candidate: Candidate, examiner: str, python: str | None = None, env: Mapping[str, str] | None = None
) -> Examined | None:
    """Load a plugin in a process of its own, whatever is known of it, and have what it declares examined there.

    Args:
        candidate: the plugin.
        examiner: `"module:function"`; called with the loaded `Plugin` it yields answers that JSON can hold, each within
            `EXAMINER_SECONDS`.
        python: interpreter of another Python environment; None: this one, and what came of loading is remembered.
        env: environment variables that one needs.

    Returns:
        What was found; None where no process could be started.
    """
    import tempfile

    loaded: Mapping[str, Any] = {}
    answers: list[Mapping[str, Any]] = []
    problem = ""
    with tempfile.TemporaryFile() as output:
        try:
            with _process([candidate], examiner, output.fileno(), python, env) as answer:
                answer(START_SECONDS)
                try:
                    loaded = answer(SECONDS)
                    problem = loaded["problem"]
                    while not problem and "end" not in (said := answer(EXAMINER_SECONDS)):
                        answers.append(said)
                except _Ended as ended:
                    problem = str(ended)
        except (_Ended, OSError):
            return None
        output.seek(0)
        printed = output.read().decode(errors="replace")
    if python is None:
        _asked(*candidate).remember(loaded.get("problem", problem), loaded.get("imported", ()))
    return Examined(loaded, tuple(answers), problem, printed)


class _Ended(Exception):
    """The other process ended, or its time did; the message says how."""


@contextlib.contextmanager
def _process(
    candidates: Sequence[Candidate],
    examiner: str,
    output: int | None = None,
    python: str | None = None,
    env: Mapping[str, str] | None = None,
) -> Iterator[Callable[[float], dict[str, Any]]]:
    """Start a process that tries some plugins; yields what waits so many seconds for its next answer.

    What waits raises `_Ended` where none came.

    Raises:
        OSError: the process cannot be started.
    """
    import selectors  # these two cost every start of the command line some milliseconds
    import subprocess

    wanted = {
        "path": [] if python else [one for one in sys.path if isinstance(one, str)],
        "plugins": [[plugin.name, plugin.distribution, entry_point.value] for plugin, entry_point in candidates],
        "seconds": SECONDS,
        "examiner": examiner,
        "examiner_seconds": EXAMINER_SECONDS,
    }
    reading, writing = os.pipe()
    where = subprocess.DEVNULL if output is None else output
    try:
        # A session of its own: Ctrl-C is for this process, which ends that one.
        process = subprocess.Popen(
            [python or sys.executable, "-P", "-c", _PROGRAM, str(writing), json.dumps(wanted)],
            stdin=subprocess.DEVNULL, stdout=where, stderr=where,
            pass_fds=(writing,), start_new_session=True, env={**os.environ, **(env or {}), VARIABLE: "1"},
        )  # fmt: skip
    except OSError:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    text = b""

    def answer(seconds: float) -> dict[str, Any]:
        nonlocal text
        while b"\n" not in text:
            if not selector.select(seconds):
                raise _Ended(_overdue(seconds))
            read = os.read(reading, 1 << 16)
            if not read:
                raise _Ended(_ending(process.wait(), seconds))
            text += read
        line, _, text = text.partition(b"\n")
        return json.loads(line)

    try:
        with selectors.DefaultSelector() as selector:
            selector.register(reading, selectors.EVENT_READ)
            yield answer
    finally:
        os.close(reading)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # with all that it has started
        process.wait()


def _ending(code: int, seconds: float) -> str:
    if code == -signal.SIGALRM:  # its own clock: this process was too busy to look
        return _overdue(seconds)
    return f"it ends the process that loads it, {f'with exit code {code}' if code >= 0 else f'by signal {-code}'}"


def _overdue(seconds: float) -> str:
    return f"it was not loaded within {seconds:g} s"


@dataclass(frozen=True, slots=True)
class _Asked:
    """Where the finding on a plugin is remembered, and what it is a finding on."""

    path: Path | None
    fingerprint: str

    def unknown(self, entry_point: metadata.EntryPoint) -> bool:
        """Whether loading the plugin runs code that this process has not run."""
        return bool(self.fingerprint) and entry_point.module not in sys.modules

    def remembered(self, state: Callable[[str], list[int] | None]) -> str | None:
        """The problem that was found before, empty for none; None: not known. `state` is that of a file, now."""
        if self.path is None:
            return None
        try:
            there = json.loads(self.path.read_text(encoding="utf-8"))
            age = time.time() - float(there["at"])
            if there["fingerprint"] != self.fingerprint or (there["problem"] and not 0 <= age < REMEMBERED_SECONDS):
                return None
            same = all(state(file) == then for file, then in there["imported"].items())
            return str(there["problem"]) if same else None
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def remember(self, problem: str, imported: Iterable[str] = ()) -> None:
        """Keep what was found, and the state of files that were imported for it.

        Where that cannot be written, the plugin is tried again next time.
        """
        if self.path is None:
            return
        states = {file: _state(file) for file in imported}
        text = json.dumps({"fingerprint": self.fingerprint, "problem": problem, "at": time.time(), "imported": states})
        staging = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            staging.write_text(text, encoding="utf-8")
            os.replace(staging, self.path)
        except OSError:
            with contextlib.suppress(OSError):
                staging.unlink(missing_ok=True)


def _asked(plugin: Plugin, entry_point: metadata.EntryPoint) -> _Asked:
    owner = f"{plugin.distribution}:{plugin.name} {sys.executable} {platform.node()}"  # hosts may share a home
    name = hashlib.sha256(owner.encode()).hexdigest()[:16]
    folder = cache_folder()
    return _Asked(folder and folder / f"{name}.json", _fingerprint(plugin, entry_point))


def cache_folder() -> Path | None:
    """Where findings are remembered: a folder in the user's cache; None for a user without a home."""
    cache = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(cache) if cache else Path.home() / ".cache") / "enginehouse" / "plugins"
    except RuntimeError:  # no HOME, and a user id without an entry in passwd
        return None


def _state(file: str) -> list[int] | None:
    """Size and time of a file; None where it is gone."""
    try:
        stat = os.stat(file)
    except OSError:
        return None
    return [stat.st_size, stat.st_mtime_ns]


def _fingerprint(plugin: Plugin, entry_point: metadata.EntryPoint) -> str:
    """Changes with Python, enginehouse, and the files of the plugin's package; empty where there is no such package.

    Nothing is imported, and no file is read: their sizes and times are enough.
    """
    files = {str(path): _state(str(path)) for path in sources(entry_point.module)}
    told: list[Any] = [sys.version, __version__, plugin.version, entry_point.value, files]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest() if files else ""


def sources(module: str) -> list[Path]:
    """The files of the outermost package that a module is of which Python would import, sorted. None is imported.

    A namespace package is none: packages of others lie in it.
    """
    name, *inner = module.split(".")
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return []
    while inner and spec and spec.origin is None and spec.submodule_search_locations is not None:
        name = f"{name}.{inner.pop(0)}"
        spec = PathFinder.find_spec(name, spec.submodule_search_locations) or spec
    if spec is None:
        return []
    if spec.submodule_search_locations is None:
        return [Path(spec.origin)] if spec.origin and Path(spec.origin).is_file() else []
    walks = (walk for folder in spec.submodule_search_locations for walk in os.walk(folder))
    there = [(folder, files) for folder, _, files in walks if os.path.basename(folder) != "__pycache__"]
    return sorted(Path(folder, file) for folder, files in there for file in files if file.endswith(_SUFFIXES))
