"""What a plugin imports, held against the contract and against what its distribution requires. Its source is read."""

import ast
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
    """An import of a plugin's file, wherever it stands in it.

    Attributes:
        module: what is imported, or imported from.
        name: what is imported from the module; empty where it is the module itself.
        where: the file, and the line.
    """

    module: str
    name: str
    where: str


def imports_of(files: Iterable[Path]) -> Iterator[Import]:
    """Yield what some files of Python import, but for what lies in their own package by a relative name."""
    for file in files:
        try:
            tree = parse(file.read_text(encoding="utf-8")) if file.suffix == ".py" else ast.Module([], [])
        except (OSError, SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                yield from (Import(one.name, "", f"{file}:{node.lineno}") for one in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield from (Import(node.module, one.name, f"{file}:{node.lineno}") for one in node.names)


@functools.cache
def promised() -> Mapping[str, frozenset[str]]:
    """Return the names of the contract by module. `make contract` writes them."""
    text = resources.files("enginehouse.plugin").joinpath("promised.json").read_text(encoding="utf-8")
    return {module: frozenset(names) for module, names in json.loads(text).items()}


def off_contract(one: Import) -> tuple[bool, str]:
    """Return whether an import fails, and what is to be said of it; nothing where the contract has what it imports."""
    tops = {module.partition(".")[0] for module in promised()}
    address = f"{one.module}.{one.name}".rstrip(".")
    if address in MOVED:
        return False, f"it imports {address}, which is {MOVED[address]} now; the old address goes with contract 2.0"
    modules = {part for module in promised() for part in _and_above(module)}
    is_promised = one.name in {"*", *promised().get(one.module, ())} if one.module in promised() else False
    if one.module.partition(".")[0] not in tops or is_promised or address in modules:
        return False, ""
    elsewhere = sorted(f"{module}.{one.name}" for module, names in promised().items() if one.name in names)
    if not _is_there(one):
        return True, f"it imports {address}, which is not there" + (f": it is {elsewhere[0]}" if elsewhere else "")
    hint = f"; the contract has it as {elsewhere[0]}" if elsewhere else "; it may change with any version"
    return False, f"it imports {address}, which is not of the contract{hint}"


def _and_above(module: str) -> Iterator[str]:
    """Yield a module and the packages that it is in."""
    while module:
        yield module
        module = module.rpartition(".")[0]


def _is_there(one: Import) -> bool:
    """Return whether what is imported is there, as far as reading can tell."""
    try:
        if importlib.util.find_spec(f"{one.module}.{one.name}".rstrip(".")) is not None:
            return True
    except (ImportError, AttributeError, ValueError):
        pass
    if one.name in ("", "*"):
        return one.name == "*"
    try:
        find_definition(f"{one.module}:{one.name}")
    except ResolveError:
        return False
    return True


def unrequired(plugin: Plugin, package: str, imports: Iterable[Import]) -> Iterator[tuple[Import, str]]:
    """Yield the first import of each installed distribution that neither the plugin's own nor any that it requires
    brings, with that distribution's name."""
    owners = {name: list(names) for name, names in metadata.packages_distributions().items()}
    for entry_point in find_entry_points():  # those of a checkout have no files that tell
        if entry_point.dist is not None:
            owners.setdefault(entry_point.module.partition(".")[0], []).append(entry_point.dist.name)
    brought = _brought_by(plugin)
    for one in imports:
        top = one.module.partition(".")[0]
        bringing = {canonical_name(name) for name in owners.get(top, ())}
        if top not in (CORE, package, *sys.stdlib_module_names) and bringing and not bringing & brought:
            brought |= bringing
            yield one, min(bringing)


def _brought_by(plugin: Plugin) -> set[str]:
    """Return the distributions that come with a plugin's, by its extras and its records' own requirements too."""
    from packaging.requirements import InvalidRequirement, Requirement

    named = [text for record in plugin.records for text in getattr(record, "requires", ())]
    waiting = [(plugin.distribution, None), *((text, "") for line in named for text in line.split("|"))]
    found: set[tuple[str, str | None]] = set()
    while waiting:
        text, extra = waiting.pop()
        try:
            wanted = Requirement(text)
            name = canonical_name(wanted.name)
            if (name, extra) in found:
                continue
            found.add((name, extra))
            required = [Requirement(line) for line in metadata.requires(name) or ()]
        except (InvalidRequirement, metadata.PackageNotFoundError):
            continue
        for one in required:
            if extra is None or one.marker is None or one.marker.evaluate({"extra": extra}):
                waiting += [(one.name, more) for more in ("", *one.extras)]
    return {name for name, _ in found}


def is_own(plugin: Plugin) -> bool:
    """Return whether a plugin is released with core, and so may use more of it than the contract."""
    return canonical_name(plugin.distribution) in own_distributions()
