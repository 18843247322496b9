"""Compares a plugin's imports with the contract and with its requirements, by reading the plugin's source."""

import ast
import contextlib
import functools
import importlib.util
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata, resources
from pathlib import Path

from enginehouse.plugin import Plugin, ResolveError
from enginehouse.plugin.discovery import find_entry_points
from enginehouse.plugin.first_party import own_distributions
from enginehouse.plugin.loaded import CORE, canonical_name
from enginehouse.plugin.moved import MOVED
from enginehouse.plugin.references import find_definition, parse


@dataclass(frozen=True, slots=True)
class Import:
    """An import in a plugin's file.

    Attributes:
        module: the imported module, or the module of the imported name.
        name: the name imported from the module; empty if the module itself is imported.
        where: file and line.
    """

    module: str
    name: str
    where: str


def imports_of(files: Iterable[Path]) -> Iterator[Import]:
    """Yield the imports in some Python files, except relative ones."""
    for file in files:
        try:
            tree = parse(file.read_text(encoding="utf-8")) if file.suffix == ".py" else ast.Module([], [])
        except (OSError, SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                yield from (Import(alias.name, "", f"{file}:{node.lineno}") for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield from (Import(node.module, alias.name, f"{file}:{node.lineno}") for alias in node.names)


@functools.cache
def promised() -> Mapping[str, frozenset[str]]:
    """Return the names of the contract by module, as `make contract` wrote them."""
    text = resources.files("enginehouse.plugin").joinpath("promised.json").read_text(encoding="utf-8")
    return {module: frozenset(names) for module, names in json.loads(text).items()}


def off_contract(imported: Import) -> tuple[bool, str]:
    """Return True if an import fails, and a description of the mistake, which is empty if the contract has the name."""
    tops = {module.partition(".")[0] for module in promised()}
    module, name = imported.module, imported.name
    address = f"{module}.{name}".rstrip(".")
    if address in MOVED:
        return False, f"it imports {address}, which is now {MOVED[address]}; contract 2.0 removes the old import path"
    modules = {part for promise in promised() for part in _with_parents(promise)}
    is_promised = module in promised() and name in {"*", *promised()[module]}
    if module.partition(".")[0] not in tops or is_promised or address in modules:
        return False, ""
    elsewhere = sorted(f"{promise}.{name}" for promise, names in promised().items() if name in names)
    if not _exists(imported):
        return True, f"it imports {address}, which does not exist" + (f": use {elsewhere[0]}" if elsewhere else "")
    hint = f"; the contract has it as {elsewhere[0]}" if elsewhere else " and may change with any version"
    return False, f"it imports {address}, which is not part of the contract{hint}"


def _with_parents(module: str) -> Iterator[str]:
    """Yield a module and the packages that it is in."""
    while module:
        yield module
        module = module.rpartition(".")[0]


def _exists(imported: Import) -> bool:
    """Return True if the imported module or name exists, as far as reading can tell."""
    module, name = imported.module, imported.name
    with contextlib.suppress(ImportError, AttributeError, ValueError):
        if importlib.util.find_spec(f"{module}.{name}".rstrip(".")) is not None:
            return True
    if name in ("", "*"):
        return name == "*"
    try:
        find_definition(f"{module}:{name}")
    except ResolveError:
        return False
    return True


def unrequired(plugin: Plugin, package: str, imports: Iterable[Import]) -> Iterator[tuple[Import, str]]:
    """Find the installed distributions from which a plugin imports without requiring them. For each of them, yield the
    first import and the distribution's name."""
    owners = {name: list(names) for name, names in metadata.packages_distributions().items()}
    for entry_point in find_entry_points():  # those of a checkout have no files that tell
        if entry_point.dist is not None:
            owners.setdefault(entry_point.module.partition(".")[0], []).append(entry_point.dist.name)
    brought = _brought_by(plugin)
    for imported in imports:
        top = imported.module.partition(".")[0]
        bringing = {canonical_name(name) for name in owners.get(top, ())}
        if top not in (CORE, package, *sys.stdlib_module_names) and bringing and not bringing & brought:
            brought |= bringing
            yield imported, min(bringing)


def _brought_by(plugin: Plugin) -> set[str]:
    """Return the distributions that are installed together with a plugin: by its distribution, its extras, and the
    requirements of its records."""
    from packaging.requirements import InvalidRequirement, Requirement

    named = [text for record in plugin.records for text in getattr(record, "requires", ())]
    waiting = [(plugin.distribution, None), *((text, "") for line in named for text in line.split("|"))]
    seen: set[tuple[str, str | None]] = set()
    while waiting:
        text, extra = waiting.pop()
        try:
            name = canonical_name(Requirement(text).name)
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            required = [Requirement(line) for line in metadata.requires(name) or ()]
        except (InvalidRequirement, metadata.PackageNotFoundError):
            continue
        for requirement in required:
            if extra is None or requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                waiting += [(requirement.name, more) for more in ("", *requirement.extras)]
    return {name for name, _ in seen}


def is_own(plugin: Plugin) -> bool:
    """Return True if a plugin is released with core, so that it may use more of core than the contract."""
    return canonical_name(plugin.distribution) in own_distributions()
