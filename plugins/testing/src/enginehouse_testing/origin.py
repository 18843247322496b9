"""The distribution of a record and the digest of its code, which tell certificates of two versions apart."""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from enginehouse.plugin import Plugin, Record, plugins
from enginehouse.plugin.loaded import canonical_name

BRINGS_WEIGHTS = ("train", "rollout", "transport")
OF_CORE = ("enginehouse.weights",)
"""Packages of core whose code is part of every engine and transport. Core's version stands for the rest of core, as an
edit of a command or of the loop changes no engine."""

GIT_SECONDS = 10.0
"""Longest time git may take."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a record.

    Attributes:
        distribution: the installed distribution, or empty.
        version: the distribution's version.
        digest: `"sha256:..."` of all files of the packages that the record names, of the plugins that its distribution
            requires, and of `OF_CORE` if its kind handles weights. Editing a file of a checkout changes the digest too.
    """

    distribution: str
    version: str
    digest: str

    def __str__(self) -> str:
        named = f"{self.distribution} {self.version}" if self.distribution else "no distribution"
        return f"{named}, {self.digest[:19]}"


def origin_of(record: Record) -> Origin:
    """Return the origin of a record, which need not be registered. No code of the record is imported."""
    modules = _modules(record)
    owner = _owner(record, modules)
    named = [*modules, *([owner.module] if owner is not None else [])]
    named += [plugin.module for plugin in _requirements(owner)]
    digest = _digest(sorted({*map(_package, named), *(OF_CORE if record.kind in BRINGS_WEIGHTS else ())}))
    return Origin(owner.distribution, owner.version, digest) if owner is not None else Origin("", "", digest)


@dataclass(frozen=True, slots=True)
class Commit:
    """The commit of the checkout that contains a record's code; `changed` is True if files differ from the commit."""

    hash: str
    changed: bool

    def __str__(self) -> str:
        return f"{self.hash[:8]}{', and files that differ from it' * self.changed}"


def commit_of(record: Record) -> Commit | None:
    """Return the commit of a record's code; None if the code is in no git checkout, or git is missing."""
    files = [path for module in _modules(record) for _, path in _files(_package(module))][:1]
    if not files or _git(files[0].parent, "ls-files", "--error-unmatch", files[0].name) is None:
        return None  # git has no such file, or the file is in an environment within somebody's checkout
    commit, changed = _git(files[0].parent, "rev-parse", "HEAD"), _git(files[0].parent, "status", "--porcelain")
    return None if not commit or changed is None else Commit(commit, bool(changed))


def head() -> str:
    """Return the commit of the checkout in which this program was started, or an empty string."""
    return _git(Path.cwd(), "rev-parse", "HEAD") or ""


def _git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, timeout=GIT_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def required_plugins(record: Record) -> list[str]:
    """Return the distributions of the other plugins that a record's plugin requires. None of their code is imported."""
    return [plugin.distribution for plugin in _requirements(_owner(record, _modules(record)))]


def protocol_of(record: Record) -> str:
    """Return the contract version that a record's plugin is written for; empty if the record has no plugin."""
    owner = _owner(record, _modules(record))
    return "" if owner is None else owner.protocol


def _modules(record: Record) -> list[str]:
    return sorted({getattr(record, field).partition(":")[0] for field in record.references})


def _owner(record: Record, modules: list[str]) -> Plugin | None:
    """Return the plugin that declares a record; for an unregistered record, the plugin whose code it names."""
    manager = plugins()
    providers = manager.providers(record.kind, record.name)
    declaring = [provided.plugin for provided in providers if provided.record == record]
    packages = {_package(module) for module in modules}
    return next(
        iter([*declaring, *(plugin for plugin in manager.plugins if _package(plugin.module) in packages)]), None
    )


def _requirements(owner: Plugin | None) -> list[Plugin]:
    """Return the other plugins that a plugin's distribution requires, directly or not."""
    installed = {canonical_name(plugin.distribution): plugin for plugin in plugins().plugins if not plugin.internal}
    required: dict[str, Plugin] = {}
    waiting = [owner.distribution] if owner is not None and not owner.internal else []
    while waiting:
        try:
            texts = metadata.requires(waiting.pop()) or ()
        except metadata.PackageNotFoundError:
            continue
        for requirement in map(Requirement, texts):
            name = canonical_name(requirement.name)
            applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if applies and name in installed and name not in required:
                required[name] = installed[name]
                waiting.append(name)
    return list(required.values())


def _package(module: str) -> str:
    """Return the package whose files count as a module's code.

    For a module of core, it is the package that contains the module; for all others, the top-level package.
    """
    top, _, rest = module.partition(".")
    return module.rpartition(".")[0] if top == "enginehouse" and rest else top


def _digest(packages: list[str]) -> str:
    digest = hashlib.sha256()
    for package in packages:
        for name, path in sorted(_files(package)):
            content = path.read_bytes()
            digest.update(f"{package}/{name} {len(content)}\n".encode() + content)
    return f"sha256:{digest.hexdigest()}"


def _files(package: str) -> Iterator[tuple[str, Path]]:
    """Yield name and path of every file of a package, except files that Python compiled."""
    top, *below = package.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None:
        return
    if spec.submodule_search_locations is None:
        yield top, Path(spec.origin or "")
        return
    for location in spec.submodule_search_locations:
        folder = Path(location, *below)
        for path in folder.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc":
                yield path.relative_to(folder).as_posix(), path
