"""The runtimes on this machine: their folder, their manifests, and their states.

A runtime is a folder with a virtual environment and a manifest. The manifest is written last, so a runtime without a
manifest is incomplete.
"""

from __future__ import annotations

import json
import os
import shutil
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from enginehouse.errors import nearest
from enginehouse.jsontext import decode_json
from enginehouse.plugin.records import Backend
from enginehouse.plugin.requirements import installed_version
from enginehouse.runtimes.errors import RuntimeProblem
from enginehouse.runtimes.ingredients import default_name, make_recipe, python_of_this_process, ray_version

FOLDER_VARIABLE = "ENGINEHOUSE_RUNTIMES"

MANIFEST = "manifest.json"

Word = Literal["ok", "stale", "broken", "half-made", "being made"]


@dataclass(frozen=True, slots=True)
class Manifest:
    """The description of a runtime, which is stored in the runtime's folder.

    Attributes:
        variant: name of the engine's requirement set from which the runtime was made.
        module: top-level module of the engine; empty: none.
        python: implementation and minor version, such as `"cpython 3.11"`.
        versions: versions of the engine (`"engine"`), `python`, `ray`, `torch` and `transformers`, if installed.
        made: time at which the runtime was made, ISO 8601 in UTC.
    """

    backend: str
    variant: str
    key: str
    module: str
    python: str
    versions: Mapping[str, str] = field(default_factory=dict)
    made: str = ""

    def write(self, folder: Path) -> None:
        """Write the manifest into `folder`, which completes the runtime there."""
        draft = folder / f"{MANIFEST}.draft"
        draft.write_text(json.dumps(asdict(self), indent=2) + "\n")
        os.replace(draft, folder / MANIFEST)


@dataclass(frozen=True, slots=True)
class Runtime:
    """A runtime on this machine, complete or not.

    Attributes:
        manifest: the manifest; None if the runtime is incomplete.
    """

    name: str
    path: Path
    manifest: Manifest | None

    @property
    def python(self) -> Path:
        return self.path / sysconfig.get_path("scripts", "venv", {"base": ""}).lstrip("/\\") / "python"

    @property
    def packages(self) -> Path:
        return Path(sysconfig.get_path("purelib", "venv", {"base": str(self.path), "platbase": str(self.path)}))

    def size(self) -> int:
        """Return the size of the runtime on disk in bytes."""
        return sum(path.lstat().st_size for path in self.path.rglob("*"))


@dataclass(frozen=True, slots=True)
class RuntimeState:
    """The state of a runtime.

    Attributes:
        word: `"ok"`, or the kind of problem.
        cure: the command that solves the problem.
    """

    word: Word
    problem: str = ""
    cure: str = ""


def cache_folder() -> Path:
    """Return enginehouse's folder in the user's cache. Raises `RuntimeError` if the user has no home directory, and
    `XDG_CACHE_HOME` is not set."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "enginehouse"


def runtimes_folder() -> Path:
    """Return the folder of runtimes: `ENGINEHOUSE_RUNTIMES`, else a folder in the user's cache. Raises `RuntimeProblem`
    if the user has no home directory, and no variable names another folder."""
    named = os.environ.get(FOLDER_VARIABLE)
    try:
        return Path(named).expanduser().absolute() if named else cache_folder() / "runtimes"
    except RuntimeError:  # no HOME, and no entry in passwd for the user id
        raise RuntimeProblem(
            f"there is no home directory to keep runtimes in; set the environment variable {FOLDER_VARIABLE} to a "
            "folder"
        ) from None


def list_runtimes() -> list[Runtime]:
    """Return all runtimes, sorted by name; an empty list if there is no folder for them."""
    try:
        paths = sorted(runtimes_folder().iterdir()) if runtimes_folder().is_dir() else []
    except RuntimeProblem:
        return []
    return [read_runtime(path) for path in paths if path.is_dir() and not path.name.startswith(".")]


def read_runtime(path: Path) -> Runtime:
    try:
        manifest = Manifest(**decode_json((path / MANIFEST).read_text()))
    except (OSError, ValueError, TypeError):
        manifest = None
    return Runtime(path.name, path, manifest)


def find_runtime(name: str) -> Runtime:
    """Return the runtime `name`. Raises `RuntimeProblem` if there is no such runtime."""
    runtimes = list_runtimes()
    for runtime in runtimes:
        if runtime.name == name:
            return runtime
    names = [runtime.name for runtime in runtimes if runtime.manifest and runtime.manifest.backend == name]
    if names:
        raise RuntimeProblem(
            f"no runtime {name!r} in {runtimes_folder()}: {name!r} is an engine, whose runtimes are "
            f"{', '.join(names)}. Use the name of a runtime, or `own` for the engine's runtime that fits this machine"
        )
    raise RuntimeProblem(
        f"no runtime {name!r} in {runtimes_folder()}. {nearest(name, [runtime.name for runtime in runtimes])}. "
        "Create a runtime with `enginehouse runtime create ENGINE`"
    )


def remove_runtime(runtime: Runtime) -> None:
    """Delete a runtime. Raises `RuntimeProblem` if another process is making it."""
    with lock_runtime(runtime.name) as free:
        if not free:
            raise RuntimeProblem(f"runtime {runtime.name!r} cannot be removed: it is being made by another process")
        clear(runtime.path)


def clear(path: Path) -> None:
    """Delete a runtime's folder. The manifest is deleted first, so that a runtime whose deletion was interrupted counts
    as incomplete."""
    if path.is_dir():
        (path / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(path)


@contextmanager
def lock_runtime(name: str, seconds: float = 0.0, waiting: Callable[[], None] = lambda: None) -> Iterator[bool]:
    """Keep other processes from making or removing the runtime `name`. Yield False if another process is doing so.

    Args:
        seconds: maximum time to wait for the other process.
        waiting: called every second during the wait.
    """
    from filelock import FileLock, Timeout

    try:
        runtimes_folder().mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RuntimeProblem(
            f"cannot create the folder of runtimes {runtimes_folder()}: {error.strerror}. Set ENGINEHOUSE_RUNTIMES to "
            "another folder"
        ) from error
    lock = FileLock(runtimes_folder() / f".{name}.lock")
    deadline = time.monotonic() + seconds
    free = False
    while not free:
        with suppress(Timeout):
            lock.acquire(timeout=0)
            free = True
        if not free:
            if time.monotonic() >= deadline:
                break
            waiting()
            time.sleep(max(0.0, min(1.0, deadline - time.monotonic())))
    try:
        yield free
    finally:
        lock.release()


def find_state(runtime: Runtime, record: Backend | None) -> RuntimeState:
    """Find a runtime's state without starting its interpreter.

    Args:
        record: current record of the runtime's engine; None if no installed plugin declares the engine.
    """
    manifest = runtime.manifest
    if manifest is None:
        with lock_runtime(runtime.name) as free:
            pass
        if not free:
            return RuntimeState("being made", "another process is making or removing it")
        return RuntimeState("half-made", "its creation was interrupted", _remove_command(runtime))
    remade = remake_command(runtime, manifest)
    if not runtime.python.exists():
        return RuntimeState("broken", f"its interpreter is gone: {runtime.python}", remade)
    if manifest.python != python_of_this_process():
        problem = f"its Python is {manifest.python}, but the driver's is {python_of_this_process()}"
        return RuntimeState("broken", problem, remade)
    ray = installed_version("ray", [str(runtime.packages)]) or "absent"
    if ray != ray_version():
        return RuntimeState("broken", f"its Ray is {ray}, but the driver's is {ray_version()}", remade)
    if manifest.module and not has_module(runtime, manifest.module):
        return RuntimeState("broken", f"its engine's module {manifest.module!r} is gone", remade)
    if record is None:
        return RuntimeState(
            "stale", f"no installed plugin has an engine {manifest.backend!r}", f"pip install {_plugin(manifest)}"
        )
    if manifest.variant not in record.runtimes:
        return RuntimeState(
            "stale",
            f"engine {record.name!r} has no requirement set {manifest.variant!r} any more",
            _remove_command(runtime),
        )
    if make_recipe(record, manifest.variant).key != manifest.key:
        return RuntimeState("stale", f"engine {record.name!r} now requires other versions", remade)
    return RuntimeState("ok")


def remake_command(runtime: Runtime, manifest: Manifest) -> str:
    """Return the commands that rebuild a runtime. They include `--name` if the runtime does not have the default
    name."""
    again = f"enginehouse runtime create {manifest.backend} --variant {manifest.variant}"
    chosen = runtime.name != default_name(manifest.backend, manifest.variant, manifest.key)
    return f"{_remove_command(runtime)}; {again}{f' --name {runtime.name}' if chosen else ''}"


def _remove_command(runtime: Runtime) -> str:
    return f"enginehouse runtime remove {runtime.name}"


def _plugin(manifest: Manifest) -> str:
    return f'"enginehouse[{manifest.backend}]"'


def has_module(runtime: Runtime, module: str) -> bool:
    packages = runtime.packages
    return (packages / module).exists() or any(packages.glob(f"{module}.*"))
