"""Recipes of runtimes. A recipe lists everything that defines a runtime, and has a key, which is a hash of this list.

Runtimes with the same key are the same Python environment.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib import metadata, resources
from pathlib import Path

from enginehouse.errors import describe_os_error
from enginehouse.plugin.discovery import find_entry_points
from enginehouse.plugin.loaded import CORE, canonical_name
from enginehouse.plugin.records import Backend
from enginehouse.plugin.requirements import installed_version
from enginehouse.runtimes.errors import RuntimeProblem

CONTROLLERS_OWN = frozenset({"tensorboardx"})
"""Requirements of the trainer that no worker imports, because only the controller has trackers."""


@dataclass(frozen=True, slots=True)
class RuntimeRecipe:
    """Everything that defines a runtime.

    Attributes:
        variant: name of the requirement set of the engine, such as `"cpu"`.
        module: top-level module of the engine; empty: none.
        pins: lines of the lock file, which pip installs without resolving dependencies; empty without a lock file.
        requirements: requirements of core and the plugin, which pip resolves with the pins as constraints.
        python: implementation and minor version of this process, such as `"cpython 3.11"`.
        prepare: `"module:function"` of the plugin, called before the import of the engine's module; empty: none.
        engine: `"module:Class"` of the plugin's engine, which workers import; empty: no worker is started.
    """

    backend: str
    variant: str
    module: str
    pins: tuple[str, ...]
    requirements: tuple[str, ...]
    python: str
    platform: str
    ray: str
    prepare: str = ""
    engine: str = ""

    @property
    def key(self) -> str:
        """Hexadecimal hash of everything that determines the installed packages."""
        installed = {name: value for name, value in asdict(self).items() if name not in ("prepare", "engine")}
        return hashlib.sha256(json.dumps(installed, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def name(self) -> str:
        """Default name of a runtime of this recipe. Recipes with different keys have different names."""
        return default_name(self.backend, self.variant, self.key)


def default_name(backend: str, variant: str, key: str) -> str:
    """Return the default name of a runtime. `key` is the key of its recipe."""
    return f"{backend}-{variant}-{key[:8]}"


def make_recipe(record: Backend, variant: str) -> RuntimeRecipe:
    """Return the recipe of an engine's runtime from one of its requirement sets, such as `"cpu"`. Raises
    `RuntimeProblem` if the engine has no requirement set of that name."""
    if variant not in record.runtimes:
        names = f"available: {', '.join(sorted(record.runtimes))}" if record.runtimes else "it declares none"
        raise RuntimeProblem(f"engine {record.name!r} has no requirement set {variant!r} for a runtime; {names}")
    requirement_set = record.runtimes[variant]
    ray = ray_version()
    third_party = [
        *_third_party(CORE),
        *(line for owner in [find_plugin(record)] if owner for line in _third_party(owner)),
    ]
    return RuntimeRecipe(
        backend=record.name,
        variant=variant,
        module=requirement_set.module,
        pins=tuple(_with_ray(_read_pins(requirement_set.lock), ray)) if requirement_set.lock else (),
        requirements=tuple(dict.fromkeys([*requirement_set.requirements, *sorted(set(third_party)), f"ray=={ray}"])),
        python=python_of_this_process(),
        platform=sysconfig.get_platform(),
        ray=ray,
        prepare=requirement_set.prepare,
        engine=record.engine,
    )


def python_of_this_process() -> str:
    """Return Python's implementation and minor version, which must be the same in all processes of a run."""
    return f"{platform.python_implementation().lower()} {sys.version_info[0]}.{sys.version_info[1]}"


def ray_version() -> str:
    """Return the version of the installed Ray, without importing it."""
    return installed_version("ray") or "absent"


def find_plugin(record: Backend) -> str | None:
    """Return the name of the distribution whose plugin provides an engine; None if core provides the engine."""
    package = record.engine.partition(":")[0].partition(".")[0]
    for entry_point in find_entry_points():
        if entry_point.value.partition(".")[0].partition(":")[0] == package and entry_point.dist is not None:
            return entry_point.dist.name
    return None


def _read_pins(lock: str) -> list[str]:
    """Read the pins of the lock file `lock`, which is given as `"package:file"`."""
    package, _, file = lock.partition(":")
    try:
        text = resources.files(package).joinpath(file).read_text(encoding="utf-8")
    except (ImportError, OSError) as error:
        raise RuntimeProblem(f"the lock {lock!r} of a runtime cannot be read: {describe_os_error(error)}") from error
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    return [line for line in lines if line]


def _with_ray(lines: Iterable[str], ray: str) -> list[str]:
    """Replace the lock file's version of Ray by the driver's version. All processes of a cluster need the same Ray."""
    from packaging.requirements import Requirement

    return [f"ray=={ray}" if Requirement(line).name.lower() == "ray" else line for line in lines]


def _third_party(distribution: str) -> list[str]:
    """Return the third-party requirements of a distribution, without extras and packages that no worker needs."""
    from packaging.requirements import Requirement

    first_party = {CORE, *(canonical_name(point.dist.name) for point in find_entry_points() if point.dist)}
    try:
        requirements = [Requirement(text) for text in metadata.requires(distribution) or ()]
    except metadata.PackageNotFoundError:  # the distribution runs from its source
        return []
    return [
        str(requirement)
        for requirement in requirements
        if canonical_name(requirement.name) not in first_party | CONTROLLERS_OWN
        and (requirement.marker is None or requirement.marker.evaluate({"extra": ""}))
    ]


def holds_packages(path: str | Path) -> bool:
    """Return True for a folder of installed packages, which another Python environment must not see."""
    return bool({"site-packages", "dist-packages"} & set(Path(path).parts))
