"""Runtimes that look made, and hold nothing but what their state is told by."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from distributions import installed

from enginehouse.plugin import Backend
from enginehouse.runtimes import Runtime, make_recipe
from enginehouse.runtimes.ingredients import ray_version
from enginehouse.runtimes.store import read_runtime


def made_up_runtime(backend: Backend, home: Path, name: str | None = None, **changed: Any) -> Runtime:
    """A runtime with `swift-engine-cpu` 2.1, as `make_runtime` leaves it for a backend; `changed` are the manifest's
    fields."""
    wanted = make_recipe(backend, "cpu")
    runtime = read_runtime(home / (name or wanted.name))
    runtime.packages.mkdir(parents=True)
    runtime.python.parent.mkdir()
    runtime.python.symlink_to(os.path.realpath(sys.executable))
    (runtime.path / "pyvenv.cfg").write_text(f"home = {os.path.dirname(os.path.realpath(sys.executable))}\n")
    (runtime.packages / "swift").mkdir()
    installed(runtime.packages, "swift-engine-cpu", version="2.1")
    installed(runtime.packages, "ray", version=ray_version())
    manifest = {
        "backend": backend.name, "variant": "cpu", "key": wanted.key, "module": "swift", "python": wanted.python,
        "versions": {"engine": "2.1"}, "made": "",
    }  # fmt: skip
    (runtime.path / "manifest.json").write_text(json.dumps(manifest | changed))
    return read_runtime(runtime.path)
