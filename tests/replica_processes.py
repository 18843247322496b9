"""Replicas of engines that run elsewhere: in a worker process under their own interpreter, and beside a trainer."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from integration.run_process import RunProcess
from projects import Project

from enginehouse.controller import ResourcePool, WorkerGroup, WorkerSpec
from enginehouse.plugin import plugins
from enginehouse.runtimes import choose_runtime
from enginehouse_testing.models import tiny_model

PROMPTS, SAMPLES = 16, 4
"""Of a parity run."""


def runtime_named(backend: str) -> str:
    """The runtime that a backend is tested in: a name, or `auto`."""
    return os.environ.get(f"ENGINEHOUSE_TEST_{backend.upper()}_RUNTIME", "auto")


def runtime_of(backend: str) -> Any:
    """The interpreter that a backend runs under, and the environment of its workers."""
    return choose_runtime(plugins().get("rollout", backend, elsewhere=True), runtime_named(backend))


@contextlib.contextmanager
def replica_process(worker: type, runtime: Any, name: str, seconds: float, **env: str) -> Iterator[WorkerGroup]:
    """A worker process under the interpreter of a runtime.

    Args:
        worker: what it holds.
        runtime: of `runtime_of`.
        name: of the group, in errors.
        seconds: longest any call may take, an engine's launch included.
        env: further environment variables.
    """
    spec = WorkerSpec(worker).options(python=runtime.python, env={**runtime.env, **env}, distributed=False)
    pool = ResourcePool([1])
    try:
        with WorkerGroup(pool, spec, name=name, timeout=seconds) as group:
            yield group
    finally:
        pool.shutdown()


def parity_of(directory: Path, backend: str, trainer: str, processes: int) -> None:
    """Run `enginehouse parity` after an update; check that both compute every token alike."""
    found = compared(directory, backend, trainer, processes, "--tolerance=1e-4")["found"]
    assert 0 < found["mean"] <= 1e-4  # exactly 0 would be one engine compared with itself
    assert found["outside"] == 0


def compared(directory: Path, backend: str, trainer: str, processes: int, *arguments: str) -> dict[str, Any]:
    """Run `enginehouse parity` after an update, with further arguments; return what it writes."""
    project = Project(directory)
    project.config |= {
        "model": {"path": tiny_model(hidden=128)},  # whose heads vLLM's CPU attention takes
        "actor": {"processes": processes, "engine": {"backend": trainer}},
        "rollout": {
            "samples_per_prompt": SAMPLES,
            "sampling": {"max_tokens": 32, "temperature": 0.8},
            "engine": {"backend": backend, "runtime": runtime_named(backend), "options": {"kv_cache_mib": 64}},
        },
    }
    project.save()
    command = ("parity", "grpo.yaml", f"--prompts={PROMPTS}", "--out=found", *arguments)
    with RunProcess(*command, cwd=project.root, directory=project.root, logs=project.root / "logs") as run:
        ended = run.finish(800)
    assert ended.code == 0, ended.out + ended.err
    written: dict[str, Any] = json.loads((project.root / "found" / "parity.json").read_text())
    assert written["found"]["sequences"] == PROMPTS * SAMPLES
    actor, rollout = written["roles"]["actor"][0], written["roles"]["rollout"][0]
    assert (actor["backend"], rollout["backend"]) == (trainer, backend)
    assert actor["pid"] != rollout["pid"]
    return written
