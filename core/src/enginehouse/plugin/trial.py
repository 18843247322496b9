"""Trying a plugin in a process of its own before it is loaded here.

A plugin's module is other people's code that runs in every command: one that ends the process, hangs or raises
`KeyboardInterrupt` would cost everybody. So each is loaded once in a child process, with nothing to print to; what is
found is remembered for the plugin's files as they are, in the user's cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.machinery import PathFinder
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
sys.path[:] = asked["path"]
from enginehouse.plugin.trial_process import main
main(int(sys.argv[1]), asked["plugins"], asked["examine"], asked["seconds"])
"""

Candidate = tuple[Plugin, metadata.EntryPoint]


@dataclass(frozen=True, slots=True)
class Found:
    """What became of a plugin in the other process.

    Attributes:
        problem: why it must not be loaded here, in words; empty where it may be, and shows any error of its own.
        wrong: what `examine` had to say of its records.
    """

    problem: str = ""
    wrong: tuple[str, ...] = ()


def problems(candidates: Sequence[Candidate]) -> list[str]:
    """Why each of some plugins must not be loaded in this process; empty where it may be.

    One that was imported here before is not tried, nor one of which this is known from an earlier process.
    """
    if VARIABLE in os.environ:
        return [""] * len(candidates)
    asked = [_asked(*candidate) for candidate in candidates]
    fresh = [number for number, candidate in enumerate(candidates) if asked[number].unknown(candidate[1])]
    found = {number: asked[number].remembered() for number in range(len(asked))}
    unheard = [number for number in fresh if found[number] is None]
    for number, tried in zip(unheard, try_out([candidates[number] for number in unheard]), strict=True):
        if tried is not None:
            found[number] = tried.problem
    return [found[number] or "" if number in fresh else "" for number in range(len(asked))]


def try_out(candidates: Sequence[Candidate], examine: str = "", seconds: float | None = None) -> list[Found | None]:
    """Load each of some plugins in another process, whatever is known of it, and remember what was found.

    Args:
        candidates: the plugins.
        examine: `"module:function"` that is called there with each record, and lists what is wrong with it. What it
            imports may do worse than loading, so nothing is then remembered.
        seconds: longest each may take; None: `SECONDS`.

    Returns:
        What was found of each; None where no process could be started.
    """
    found: list[Found | None] = []
    while len(found) < len(candidates):
        rest = candidates[len(found) :]
        those, problem = _in_one_process(rest, examine, SECONDS if seconds is None else seconds)
        found += those
        if problem is None:
            return [*found, *([None] * (len(candidates) - len(found)))]
        if problem:
            found.append(Found(problem))
    for candidate, one in zip(candidates, found, strict=True):
        if one is not None and not examine:
            _asked(*candidate).remember(one.problem)
    return found


def _in_one_process(candidates: Sequence[Candidate], examine: str, seconds: float) -> tuple[list[Found], str | None]:
    """What was found of the first candidates, and what the next one did to the process: empty where all were tried,
    None where the process did not come to the first."""
    import selectors  # these two cost every start of the command line some milliseconds
    import subprocess

    wanted = {
        "path": [one for one in sys.path if isinstance(one, str)],
        "plugins": [[plugin.name, plugin.distribution, entry_point.value] for plugin, entry_point in candidates],
        "examine": examine,
        "seconds": seconds,
    }
    reading, writing = os.pipe()
    try:
        # A session of its own: Ctrl-C is for this process, which ends that one.
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM, str(writing), json.dumps(wanted)],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            pass_fds=(writing,), start_new_session=True, env={**os.environ, VARIABLE: "1"},
        )  # fmt: skip
    except OSError:
        os.close(reading)
        return [], None
    finally:
        os.close(writing)
    found: list[Found] = []
    begun, text = False, b""
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(reading, selectors.EVENT_READ)
            while len(found) < len(candidates):
                if not selector.select(seconds if begun else START_SECONDS):
                    return found, _overdue(seconds) if begun else None
                read = os.read(reading, 1 << 16)
                if not read:
                    return found, _ending(process.wait(), seconds) if begun else None
                *lines, text = (text + read).split(b"\n")
                for line in lines:
                    said = json.loads(line)
                    if begun:
                        found.append(Found(said["problem"], tuple(said["wrong"])))
                    begun = True
        return found, ""
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

    def remembered(self) -> str | None:
        """The problem that was found before, empty for none; None: not known."""
        if self.path is None:
            return None
        try:
            there = json.loads(self.path.read_text(encoding="utf-8"))
            age = time.time() - float(there["at"])
            if there["fingerprint"] != self.fingerprint or (there["problem"] and not 0 <= age < REMEMBERED_SECONDS):
                return None
            return str(there["problem"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def remember(self, problem: str) -> None:
        """Keep what was found; where that cannot be written, the plugin is tried again next time."""
        if self.path is None:
            return
        text = json.dumps({"fingerprint": self.fingerprint, "problem": problem, "at": time.time()})
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


def _fingerprint(plugin: Plugin, entry_point: metadata.EntryPoint) -> str:
    """Changes with Python, enginehouse, and the files of the plugin's package; empty where there is no such package.

    Nothing is imported, and no file is read: their sizes and times are enough.
    """
    files = [(str(path), (stat := path.stat()).st_size, stat.st_mtime_ns) for path in sources(entry_point.module)]
    told: list[Any] = [sys.version, __version__, plugin.version, entry_point.value, files]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest() if files else ""


def sources(module: str) -> list[Path]:
    """The Python files of the outermost package that a module is of, sorted. Nothing is imported.

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
    return sorted(path for folder in spec.submodule_search_locations for path in Path(folder).rglob("*.py"))
