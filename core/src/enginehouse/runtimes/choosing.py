"""Chooses the interpreter of an engine's workers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from enginehouse.plugin.loaded import CORE
from enginehouse.plugin.records import Backend
from enginehouse.plugin.requirements import Missing, find_missing, install_line
from enginehouse.runtimes.errors import NoRuntime, RuntimeProblem
from enginehouse.runtimes.ingredients import find_plugin, holds_packages, make_recipe
from enginehouse.runtimes.overlay import make_overlay
from enginehouse.runtimes.probe import check_interpreter
from enginehouse.runtimes.store import Runtime, find_runtime, find_state, list_runtimes

CURRENT = "current"
"""Name of this process's Python environment."""

OWN = "own"
"""Value of `engine.runtime` for the runtime that was made for the engine, whatever the name of that runtime is."""

RUNTIME_VARIABLE = "ENGINEHOUSE_RUNTIME"
"""Environment variable that holds the name of a worker's runtime; unset if the worker uses the driver's environment."""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """The interpreter of a worker.

    Attributes:
        name: `"current"`, the name of a runtime, or a path.
        python: path of the interpreter; None: the interpreter of this process.
        reason: reason of the choice, for a plan.
    """

    name: str
    python: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    reason: str = field(default="", compare=False)


def choose_runtime(record: Backend, wanted: str = "auto", device: str = "cpu") -> Interpreter:
    """Choose the interpreter for workers of an engine. The engine is not imported, and no environment is made.

    Args:
        wanted: `"auto"`: this process's environment if it meets the engine's requirements, else the engine's runtime
            for `device`; `"current"`: this process's environment; `"own"`: the engine's runtime in any case; the name
            of a runtime; or a path to an interpreter or its environment.
        device: torch device type, which is also the name of the requirement set.

    Raises:
        RuntimeProblem: the interpreter does not exist or cannot be used. `NoRuntime` if the runtime must be made first.
    """
    if wanted in ("auto", CURRENT):
        missing = list(find_missing(record.requires))
        if not missing:
            met = "this Python environment meets the engine's requirements"
            return Interpreter(CURRENT, reason="chosen by engine.runtime" if wanted == CURRENT else met)
        if wanted == CURRENT:
            raise RuntimeProblem(f"{record.name!r} cannot run in this Python environment: {_join(missing)}")
        reason = f"the driver's environment does not meet the engine's requirements: {missing[0]}"
        return _choose_own(record, device, _join(missing), reason, install_line(missing, find_plugin(record) or CORE))
    if wanted == OWN:
        none = "" if record.runtimes else ", but declares no runtime"
        why = f"must run in a separate runtime (engine.runtime=own){none}"
        return _choose_own(record, device, why, "chosen by engine.runtime=own", "engine.runtime=auto")
    if os.sep in wanted or (os.altsep and os.altsep in wanted) or wanted.startswith("~"):
        return _at_path(record, wanted)
    runtime = find_runtime(wanted)
    state = find_state(runtime, _declared(record, runtime))
    if state.word != "ok":
        cure = f". Try: {state.cure}" if state.cure else ""
        raise RuntimeProblem(f"runtime {wanted!r} is {state.word}: {state.problem}{cure}")
    if runtime.manifest is not None and runtime.manifest.backend == record.name and runtime.manifest.variant != device:
        raise RuntimeProblem(
            f"runtime {wanted!r} is for {runtime.manifest.variant}, but this run is on {device}. "
            f"Try: {create_command(record.name, device)}"
        )
    _check_requirements(record, f"runtime {wanted!r}", [str(runtime.packages)])
    return _make_interpreter(runtime.name, runtime.python, "chosen by engine.runtime")


def _choose_own(record: Backend, device: str, why: str, reason: str, otherwise: str) -> Interpreter:
    """Return the interpreter of the runtime that was made for an engine and a device.

    Args:
        why: reason why the engine needs a runtime, for an error.
        reason: reason of the choice, for a plan.
        otherwise: advice of the error if the engine declares no runtime for the device.
    """
    if device not in record.runtimes:
        declared = ", ".join(sorted(record.runtimes))
        alternatives = f"; it declares runtimes only for {declared}, not for {device}" if declared else ""
        raise NoRuntime(f"{record.name!r} {why}{alternatives}. Try: {otherwise}")
    key = make_recipe(record, device).key
    candidates = [runtime for runtime in list_runtimes() if _is_made_for(runtime, record.name, device)]
    states = [(runtime, find_state(runtime, record)) for runtime in candidates]
    for runtime, state in states:
        if state.word == "ok" and runtime.manifest and runtime.manifest.key == key:
            return _make_interpreter(runtime.name, runtime.python, reason)
    problems = "".join(f"; runtime {runtime.name!r} is {state.word}: {state.problem}" for runtime, state in states)
    raise NoRuntime(
        f"{record.name!r} {why}, and there is no usable runtime of this engine for {device}{problems}. "
        f"Try: {create_command(record.name, device)}"
    )


def create_command(backend: str, variant: str) -> str:
    """Return the command that makes an engine's runtime. The command names the variant unless it is the default of this
    machine."""
    from enginehouse.runtimes.variant import detect_variant

    return f"enginehouse runtime create {backend}" + ("" if variant == detect_variant() else f" --variant {variant}")


def _is_made_for(runtime: Runtime, backend: str, variant: str) -> bool:
    manifest = runtime.manifest
    if manifest is None:  # the default name begins with both
        return runtime.name.startswith(f"{backend}-{variant}-")
    return (manifest.backend, manifest.variant) == (backend, variant)


def _at_path(record: Backend, wanted: str) -> Interpreter:
    path = Path(wanted).expanduser().absolute()
    if path.is_dir():
        path = path / "bin" / "python"
    if not path.is_file():
        raise RuntimeProblem(f"there is no Python interpreter at {path}")
    _check_requirements(record, str(path), check_interpreter(str(path)).path)
    return _make_interpreter(str(path), path, "chosen by engine.runtime")


def _check_requirements(record: Backend, where: str, path: Sequence[str]) -> None:
    if missing := list(find_missing(record.requires, path)):
        raise RuntimeProblem(f"{record.name!r} cannot run in {where}: {_join(missing)}")


def _make_interpreter(name: str, python: Path, reason: str) -> Interpreter:
    before = os.environ.get("PYTHONPATH", "")
    paths = [
        str(make_overlay().path),
        *(path for path in before.split(os.pathsep) if path and not holds_packages(path)),
    ]
    return Interpreter(name, str(python), {"PYTHONPATH": os.pathsep.join(paths), RUNTIME_VARIABLE: name}, reason)


def _declared(record: Backend, runtime: Runtime) -> Backend | None:
    """Return the current record of the engine that a runtime was made for; None if no plugin declares the engine."""
    from enginehouse.plugin.process import plugins

    manifest = runtime.manifest
    if manifest is None or manifest.backend == record.name:
        return record
    backends = plugins().all("rollout") + plugins().all("train")
    return next(iter(find_declaring(manifest.backend, backends)), None)


def find_declaring(backend: str, records: Sequence[Backend]) -> list[Backend]:
    """Return the records with this name from which a runtime can be made."""
    return [record for record in records if record.name == backend and record.runtimes]


def _join(missing: Sequence[Missing]) -> str:
    return "; ".join(map(str, missing))
