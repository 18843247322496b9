"""The runtimes there are: where they lie, what each says of itself, and whether it can be used.

A runtime is a folder with a virtual environment and, written last, a manifest: one without a manifest is not whole.
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
"""Environment variable: the folder of runtimes."""

MANIFEST = "manifest.json"

Word = Literal["ok", "stale", "broken", "half-made", "being made"]


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a runtime says of itself.

    Attributes:
        backend: whose engine it is for.
        variant: which of the backend's requirement sets it was made from.
        key: the key of its recipe.
        module: the engine's top-level module; empty: none.
        python: implementation and minor version, `"cpython 3.11"`.
        versions: of the engine (`"engine"`) and of `python`, `ray`, `torch`, `transformers`, as far as there are any.
        made: when, ISO 8601 in UTC.
    """

    backend: str
    variant: str
    key: str
    module: str
    python: str
    versions: Mapping[str, str] = field(default_factory=dict)
    made: str = ""

    def write(self, folder: Path) -> None:
        """Write it: with that the runtime in `folder` is whole."""
        draft = folder / f"{MANIFEST}.draft"
        draft.write_text(json.dumps(asdict(self), indent=2) + "\n")
        os.replace(draft, folder / MANIFEST)


@dataclass(frozen=True, slots=True)
class Runtime:
    """A runtime on this machine, whole or not.

    Attributes:
        name: what users call it: the name of its folder.
        path: its folder.
        manifest: what it says of itself; None where it is not whole.
    """

    name: str
    path: Path
    manifest: Manifest | None

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.path / sysconfig.get_path("scripts", "venv", {"base": ""}).lstrip("/\\") / "python"

    @property
    def packages(self) -> Path:
        """Where its packages lie."""
        return Path(sysconfig.get_path("purelib", "venv", {"base": str(self.path), "platbase": str(self.path)}))

    def size(self) -> int:
        """Bytes on disk."""
        return sum(one.lstat().st_size for one in self.path.rglob("*"))


@dataclass(frozen=True, slots=True)
class RuntimeState:
    """Whether a runtime can be used.

    Attributes:
        word: `"ok"`, or what it is instead.
        problem: what is wrong, in words; empty if nothing is.
        cure: the command that helps.
    """

    word: Word
    problem: str = ""
    cure: str = ""


def runtimes_folder() -> Path:
    """Where runtimes lie: `ENGINEHOUSE_RUNTIMES`, else a folder in the user's cache.

    Raises:
        RuntimeProblem: the user has no home directory, and no variable says where else.
    """
    named, cache = os.environ.get(FOLDER_VARIABLE), os.environ.get("XDG_CACHE_HOME")
    try:
        if named:
            return Path(named).expanduser().absolute()
        return (Path(cache) if cache else Path.home() / ".cache") / "enginehouse" / "runtimes"
    except RuntimeError:  # no HOME, and a user id without an entry in passwd
        raise RuntimeProblem(
            f"there is no home directory to keep runtimes in; set the environment variable {FOLDER_VARIABLE} to a "
            "folder"
        ) from None


def list_runtimes() -> list[Runtime]:
    """All there are, by name; none where there is no place for them."""
    try:
        there = runtimes_folder().is_dir()
    except RuntimeProblem:
        there = False
    if not there:
        return []
    return [
        read_runtime(path)
        for path in sorted(runtimes_folder().iterdir())
        if path.is_dir() and not path.name.startswith(".")
    ]


def read_runtime(path: Path) -> Runtime:
    """The runtime in a folder."""
    try:
        manifest = Manifest(**decode_json((path / MANIFEST).read_text()))
    except (OSError, ValueError, TypeError):
        manifest = None
    return Runtime(path.name, path, manifest)


def find_runtime(name: str) -> Runtime:
    """The runtime of a name.

    Raises:
        RuntimeProblem: there is none.
    """
    there = list_runtimes()
    for runtime in there:
        if runtime.name == name:
            return runtime
    own = [one.name for one in there if one.manifest is not None and one.manifest.backend == name]
    if own:
        raise RuntimeProblem(
            f"no runtime {name!r} in {runtimes_folder()}: that is a backend, whose runtimes are {', '.join(own)}. "
            "`own` stands for the one that fits this machine; or name one"
        )
    raise RuntimeProblem(
        f"no runtime {name!r} in {runtimes_folder()}: {nearest(name, [one.name for one in there])}. "
        "`enginehouse runtime create BACKEND` makes one"
    )


def remove_runtime(runtime: Runtime) -> None:
    """Delete a runtime.

    Raises:
        RuntimeProblem: another process is making it.
    """
    with lock_runtime(runtime.name) as free:
        if not free:
            raise RuntimeProblem(f"runtime {runtime.name!r} is being made by another process; not removed")
        clear(runtime.path)


def clear(path: Path) -> None:
    """Delete a runtime's folder, its manifest first: what is left of a deletion cut short is not whole."""
    if path.is_dir():
        (path / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(path)


@contextmanager
def lock_runtime(name: str, seconds: float = 0.0, waiting: Callable[[], None] = lambda: None) -> Iterator[bool]:
    """Keep other processes from making or removing the runtime of a name; yields whether that was free.

    Args:
        name: the runtime's name.
        seconds: how long to wait until it is free, before False is yielded.
        waiting: called every second meanwhile.
    """
    from filelock import FileLock, Timeout

    try:
        runtimes_folder().mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RuntimeProblem(
            f"runtimes are kept in {runtimes_folder()}, which cannot be made: {error.strerror}. "
            "ENGINEHOUSE_RUNTIMES names another folder"
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
    """Whether a runtime can be used here, found without starting its interpreter.

    Args:
        runtime: any.
        record: the backend it is for, as declared now; None where no installed plugin declares it.
    """
    manifest = runtime.manifest
    if manifest is None:
        with lock_runtime(runtime.name) as free:
            pass
        if not free:
            return RuntimeState("being made", "another process makes it just now")
        return RuntimeState("half-made", "its making was cut short", _removing(runtime))
    remade = remake_command(runtime, manifest)
    if not runtime.python.exists():
        return RuntimeState("broken", f"its interpreter is gone: {runtime.python}", remade)
    if manifest.python != python_of_this_process():
        return RuntimeState("broken", f"it has {manifest.python}, and this process {python_of_this_process()}", remade)
    there = installed_version("ray", [str(runtime.packages)]) or "absent"
    if there != ray_version():
        return RuntimeState("broken", f"its Ray is {there}, and the driver's {ray_version()}", remade)
    if manifest.module and not has_module(runtime, manifest.module):
        return RuntimeState("broken", f"its engine's module {manifest.module!r} is gone", remade)
    if record is None:
        return RuntimeState(
            "stale", f"no installed plugin has a backend {manifest.backend!r}", f"pip install {_plugin(manifest)}"
        )
    if manifest.variant not in record.runtimes:
        return RuntimeState(
            "stale", f"backend {record.name!r} has no requirement set {manifest.variant!r} any more", _removing(runtime)
        )
    if make_recipe(record, manifest.variant).key != manifest.key:
        return RuntimeState("stale", f"backend {record.name!r} asks for other versions by now", remade)
    return RuntimeState("ok")


def remake_command(runtime: Runtime, manifest: Manifest) -> str:
    """The commands that make a runtime anew, under the name that it has if that was chosen."""
    again = f"enginehouse runtime create {manifest.backend} --variant {manifest.variant}"
    chosen = runtime.name != default_name(manifest.backend, manifest.variant, manifest.key)
    return f"{_removing(runtime)}; {again}{f' --name {runtime.name}' if chosen else ''}"


def _removing(runtime: Runtime) -> str:
    return f"enginehouse runtime remove {runtime.name}"


def _plugin(manifest: Manifest) -> str:
    return f'"enginehouse[{manifest.backend}]"'


def has_module(runtime: Runtime, module: str) -> bool:
    packages = runtime.packages
    return (packages / module).exists() or any(packages.glob(f"{module}.*"))
