"""Whose a backend or a transport is, and which code of theirs: what tells a certificate of it from one of an older."""

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
"""What of core is part of what every engine and transport does: how weights come. The rest a certificate has by core's
version alone: an edit of a command or of the loop makes no engine another."""

GIT_SECONDS = 10.0
"""Longest git may take."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a backend or a transport comes from.

    Attributes:
        distribution: the installed distribution; empty where it is of none.
        version: that distribution's version.
        digest: of all files of the packages its strings name, of the plugins that its distribution requires, and of
            `OF_CORE` if its kind has to do with weights, `"sha256:..."`: it changes with an edit, too, of what is
            installed from a checkout.
    """

    distribution: str
    version: str
    digest: str

    def __str__(self) -> str:
        named = f"{self.distribution} {self.version}" if self.distribution else "no distribution"
        return f"{named}, {self.digest[:19]}"


def origin_of(record: Record) -> Origin:
    """Whose a record is, registered or not. Nothing of it is imported."""
    modules = _modules(record)
    owner = _owner(record, modules)
    named = [*modules, *([owner.module] if owner is not None else [])]
    named += [plugin.module for plugin in _stands_on(owner)]
    digest = _digest(sorted({*map(_package, named), *(OF_CORE if record.kind in BRINGS_WEIGHTS else ())}))
    return Origin(owner.distribution, owner.version, digest) if owner is not None else Origin("", "", digest)


@dataclass(frozen=True, slots=True)
class Commit:
    """The commit of the checkout that a record's code lies in.

    Attributes:
        hash: of the commit.
        changed: whether files of the checkout differ from it.
    """

    hash: str
    changed: bool

    def __str__(self) -> str:
        return f"{self.hash[:8]}{', and files that differ from it' * self.changed}"


def commit_of(record: Record) -> Commit | None:
    """The commit that a record's code is of; None where it lies in no git checkout, or git is not there."""
    files = [path for module in _modules(record) for _, path in _files(_package(module))][:1]
    if not files or _git(files[0].parent, "ls-files", "--error-unmatch", files[0].name) is None:
        return None  # not there, or in an environment within somebody's checkout
    found, changed = _git(files[0].parent, "rev-parse", "HEAD"), _git(files[0].parent, "status", "--porcelain")
    return None if not found or changed is None else Commit(found, bool(changed))


def head() -> str:
    """Return the commit of the checkout that this program was started in; empty where it was in none."""
    return _git(Path.cwd(), "rev-parse", "HEAD") or ""


def _git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, timeout=GIT_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def required_plugins(record: Record) -> list[str]:
    """Distributions of other plugins whose code is part of a record's. Nothing of them is imported."""
    return [plugin.distribution for plugin in _stands_on(_owner(record, _modules(record)))]


def protocol_of(record: Record) -> str:
    """Return the contract version that a record's plugin is written for; empty where it is of no plugin."""
    owner = _owner(record, _modules(record))
    return "" if owner is None else owner.protocol


def _modules(record: Record) -> list[str]:
    return sorted({getattr(record, field).partition(":")[0] for field in record.references})


def _owner(record: Record, modules: list[str]) -> Plugin | None:
    """The plugin that declares a record; of one that is not registered, the plugin whose code it names."""
    there = plugins()
    declared = [one.plugin for one in there.providers(record.kind, record.name) if one.record == record]
    packages = {_package(module) for module in modules}
    return next(iter([*declared, *(one for one in there.plugins if _package(one.module) in packages)]), None)


def _stands_on(owner: Plugin | None) -> list[Plugin]:
    """Other plugins that a plugin's distribution requires, and those they require: their code is part of it."""
    there = {canonical_name(one.distribution): one for one in plugins().plugins if not one.internal}
    found: dict[str, Plugin] = {}
    waiting = [owner.distribution] if owner is not None and not owner.internal else []
    while waiting:
        try:
            texts = metadata.requires(waiting.pop()) or ()
        except metadata.PackageNotFoundError:
            continue
        for requirement in map(Requirement, texts):
            name = canonical_name(requirement.name)
            applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if applies and name in there and name not in found:
                found[name] = there[name]
                waiting.append(name)
    return list(found.values())


def _package(module: str) -> str:
    """The package that holds a module's code: of core's own records their folder, of others all that is theirs."""
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
    """Name and path of every file of a package, but what Python compiled."""
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
