"""What plugins may count on, read from the source, and how it may change from one contract version to the next.

Public is what a module of `PACKAGES` lists in `__all__`, and every hook. `make contract` keeps it in `surface.json`,
with the version each name came in.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import griffe

from enginehouse.plugin import CONTRACT

ROOT = Path(__file__).parents[2]
SNAPSHOT = Path(__file__).with_name("surface.json")
HOOKS = "enginehouse.plugin.hookspecs"
PACKAGES = (
    "enginehouse.plugin",
    "enginehouse.engines",
    "enginehouse.data",
    "enginehouse.weights",
    "enginehouse.errors",
    "enginehouse_torch.modeling",
)
NOT_FOR_PLUGINS = {
    "enginehouse.plugin": (
        "CONTRACT", "KINDS", "Plugin", "PluginManager", "Provided", "configure_plugins", "load_plugins",
        "reload_plugins",
    ),
    "enginehouse.data": (
        "WIRE_VERSION", "DemonstrationDataset", "DemonstrationSampler", "PreferenceDataset", "PreferenceSampler",
        "PromptDataset", "PromptSampler", "Sampler", "WireVersionError", "balance",
    ),
}  # fmt: skip
"""What modules list for programs that load plugins or read data: it is not promised."""

RAISED = "the contract was raised: `make contract`"
"""All that is left to do."""

IMPLEMENTED = (
    "OffloadsState", "RolloutEngine", "SavesInBackground", "TrainEngine", "TrainsAdapters", "TransportSession",
    "WeightSource", "WeightTransport", "Environment", "Tracker", "SavedOptimizer",
)  # fmt: skip
"""Protocols that plugins implement: a further method or argument breaks those there are."""


@dataclass(frozen=True)
class Name:
    """One promised name.

    Attributes:
        says: its signature, or its type and default; of a class the classes it stands on.
        arguments: each argument of a function, as written.
        text: its docstring.
        owner: the class it is of, for a member; else empty.
    """

    says: str
    arguments: tuple[str, ...] = ()
    text: str = field(default="", compare=False)
    owner: str = ""


@functools.cache
def surface() -> dict[str, Name]:
    """All promised names by address, as they are in the source today."""
    sources = [ROOT / "core" / "src", *sorted(ROOT.glob("plugins/*/src"))]
    loader = griffe.GriffeLoader(search_paths=[str(path) for path in sources])
    for top in dict.fromkeys(package.partition(".")[0] for package in PACKAGES):
        loader.load(top)
    loader.resolve_aliases()
    found: dict[str, Name] = {}
    for package in PACKAGES:
        for module in _modules(loader.modules_collection[package]):
            wanted = [str(name) for name in module.exports or ()]
            if module.path == HOOKS:
                wanted = [name for name, one in module.members.items() if name.startswith("enginehouse_")]
            for name in wanted:
                if name not in NOT_FOR_PLUGINS.get(module.path, ()):
                    found |= _names(f"{module.path}.{name}", module[name])
    return found


def changes(before: Mapping[str, Any], today: Mapping[str, Name]) -> tuple[list[str], list[str]]:
    """What was added to a snapshot's names, and what was broken of them, a line each."""
    added = [address for address in today if address not in before and not _breaks(address, today, before)]
    broken = [f"{address} is new in a protocol that plugins implement" for address in today
              if address not in before and _breaks(address, today, before)]  # fmt: skip
    for address, entry in before.items():
        if address not in today:
            broken.append(f"{address} is gone")
        elif entry["says"] != today[address].says:
            if _only_more(entry, today[address]):
                added.append(address)
            else:
                broken.append(f"{address} was {entry['says']} and is {today[address].says}")
    return added, broken


def problem(snapshot: Mapping[str, Any], today: Mapping[str, Name], contract: tuple[int, int] = CONTRACT) -> str:
    """What must be done before the contract is as it says it is; empty where nothing must be."""
    written, published = _version(snapshot["contract"]), _version(snapshot.get("published", snapshot["contract"]))
    names = snapshot["names"]
    still_open = {address for address, entry in names.items() if _version(entry["since"]) > published}
    fixed = {address: name for address, name in today.items() if not {address, name.owner} & still_open}
    added, broken = changes({one: entry for one, entry in names.items() if one not in still_open}, fixed)
    if broken and contract[0] == written[0]:
        return "these break plugins of this major version: keep them, and warn (docs/plugins/publishing.md):" + _lines(
            broken
        )
    if added and contract == published:
        major, minor = published
        return (
            f"these came since contract {major}.{minor} was published: raise CONTRACT in plugin/hookspecs.py to "
            f"({major}, {minor + 1}), then `make contract`:" + _lines(added)
        )
    if contract != written or names != snapshot_of(today, snapshot)["names"]:
        return RAISED
    return ""


def _version(text: str) -> tuple[int, int]:
    major, minor = map(int, text.split("."))
    return major, minor


def snapshot_of(today: Mapping[str, Name], before: Mapping[str, Any]) -> dict[str, Any]:
    """The snapshot to keep: names there were keep the version they came in.

    What came in after the version that was last published (`make version` writes which) may still change.
    """
    known, version = before.get("names", {}), ".".join(map(str, CONTRACT))
    names: dict[str, dict[str, Any]] = {}
    for address, name in sorted(today.items()):
        since = known[address]["since"] if address in known else version
        names[address] = {"since": since, "says": name.says}
        if name.arguments:
            names[address]["arguments"] = list(name.arguments)
    return {"contract": version, "published": before.get("published", version), "names": names}


def kept() -> dict[str, Any]:
    """The snapshot that is kept."""
    return json.loads(SNAPSHOT.read_text(encoding="utf-8")) if SNAPSHOT.exists() else {}


def _modules(module: griffe.Module) -> Iterator[griffe.Module]:
    yield module
    for one in module.members.values():
        if not one.is_alias and one.is_module:
            yield from _modules(one)


def _names(address: str, found: griffe.Object | griffe.Alias) -> Iterator[tuple[str, Name]]:
    """A name, and where it is a class its members."""
    one = found.final_target if found.is_alias else found
    yield address, _name(one)
    if not one.is_class:
        return
    for name, member in one.all_members.items():
        private = name.startswith("_") and name != "__call__"
        outside = not member.path.startswith(("enginehouse.", "enginehouse_"))
        if not private and not outside and (member.is_function or member.is_attribute) and name != "model_config":
            yield f"{address}.{name}", _name(member.final_target if member.is_alias else member, address)


def _name(one: griffe.Object, owner: str = "") -> Name:
    text = one.docstring.value if one.docstring else ""
    if one.is_class:
        return Name(f"class({', '.join(str(base) for base in one.bases)})", text=text)
    if one.is_attribute:
        kind = str(one.annotation) if one.annotation is not None else ""
        value = "" if one.value is None else f" = {_value(one.value)}"
        says = "property: " + kind if "property" in one.labels else (kind + value).strip()
        return Name(says, text=text, owner=owner)
    arguments = tuple(_argument(parameter) for parameter in one.parameters if parameter.name not in ("self", "cls"))
    returns = f" -> {one.returns}" if one.returns is not None else ""
    kept_async = "async " if "async" in one.labels else ""
    return Name(f"{kept_async}({', '.join(arguments)}){returns}", arguments, text, owner)


def _value(value: griffe.Expr | str) -> str:
    """A default as written; what a `Field` is described by is no part of it."""
    if not isinstance(value, griffe.ExprCall) or str(value.function) != "Field":
        return str(value)
    arguments = [str(one) for one in value.arguments if getattr(one, "name", "") != "description"]
    return f"Field({', '.join(arguments)})"


def _argument(parameter: griffe.Parameter) -> str:
    stars = {griffe.ParameterKind.var_positional: "*", griffe.ParameterKind.var_keyword: "**"}
    kind = f": {parameter.annotation}" if parameter.annotation is not None else ""
    variable = parameter.kind in stars
    default = "" if parameter.default is None or variable else f" = {parameter.default}"
    only = "*, " if parameter.kind is griffe.ParameterKind.keyword_only else ""
    return f"{only}{stars.get(parameter.kind, '')}{parameter.name}{kind}{default}"


def _breaks(address: str, today: Mapping[str, Name], before: Mapping[str, Any]) -> bool:
    """Whether a further name is one that plugins of an earlier version would have to have: a method, a field."""
    name = today[address]
    if name.owner not in before:
        return False
    needed = not name.arguments and " = " not in name.says and name.says.isidentifier()
    return name.owner.rpartition(".")[2] in IMPLEMENTED or (needed and name.owner.startswith("enginehouse.plugin."))


def _only_more(entry: Mapping[str, Any], name: Name) -> bool:
    """Whether a function merely takes further arguments, with defaults; a hook may have further ones without."""
    before, now = entry.get("arguments", []), list(name.arguments)
    owner = name.owner.rpartition(".")[2]
    if not before or owner in IMPLEMENTED or entry["says"].rpartition(")")[2] != name.says.rpartition(")")[2]:
        return False
    more = [argument for argument in now if argument not in before]
    same = [argument for argument in now if argument in before]
    return same == before and all(" = " in one or one.startswith("**") for one in more)


def _lines(of: list[str]) -> str:
    return "".join(f"\n  {one}" for one in of)
