"""Reads the names that plugins may rely on from the source, and compares them with those of a contract version.

Every hook is public, and every name that a module of `PACKAGES` lists in `__all__`. `make contract` writes the names to
`surface.json`, with the version that introduced each.
"""

import ast
import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import griffe

from enginehouse.plugin import CONTRACT

ROOT = Path(__file__).parents[2]
SNAPSHOT = ROOT / "tests" / "contract" / "surface.json"
HOOKS = "enginehouse.plugin.hookspecs"
PROMISED = ROOT / "core" / "src" / "enginehouse" / "plugin" / "promised.json"
"""The names by module, with which `enginehouse plugins doctor` compares a plugin's imports."""
PACKAGES = (
    "enginehouse.plugin",
    "enginehouse.engines",
    "enginehouse.data",
    "enginehouse.weights",
    "enginehouse.errors",
    "enginehouse.quiet",
    "enginehouse_rl.advantages",
    "enginehouse_rl.losses",
    "enginehouse.rl.advantages",
    "enginehouse.rl.losses",
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
"""Names in `__all__` that are not promised, because they are for programs that load plugins or read data."""

RAISED = "the contract was raised: `make contract`"
"""The finding if only the files have to be written."""

IMPLEMENTED = (
    "OffloadsState", "RolloutEngine", "SavesInBackground", "TrainEngine", "TrainsAdapters", "TransportSession",
    "WeightSource", "WeightTransport", "Environment", "Tracker", "SavedOptimizer",
)  # fmt: skip
"""Protocols that plugins implement, so that an additional method or argument breaks existing plugins."""

GUARDED = ("enginehouse.engines.PauseMode",)
"""Types that may get more values, because an engine is given a new value only if it declares a capability."""

NOT_PROMISED = ("__post_init__", "__repr__", "__str__", "__reduce__", "__reduce_ex__", "__copy__", "__deepcopy__")
"""Special methods that say how a class works, not what it offers."""

NOT_MEANT = {"Field": ("description",), "field": ("metadata",), "hookspec": ("warn_on_impl", "warn_on_impl_args")}
"""Arguments of calls that only describe or deprecate, and change nothing for a plugin."""


@dataclass(frozen=True)
class Name:
    """One promised name.

    Attributes:
        says: signature, or type and default; for a class, its base classes.
        arguments: each argument of a function, as written.
        text: docstring.
        owner: class of a member; else empty.
        decorators: decorators, as written. The arguments of a dataclass are its member `__init__`.
        defined: import path of the definition.
    """

    says: str
    arguments: tuple[str, ...] = ()
    text: str = field(default="", compare=False)
    owner: str = ""
    decorators: tuple[str, ...] = ()
    defined: str = field(default="", compare=False)


@functools.cache
def surface() -> dict[str, Name]:
    """Return all promised names by import path, as they are in the source today."""
    sources = [ROOT / "core" / "src", *sorted(ROOT.glob("plugins/*/src"))]
    loader = griffe.GriffeLoader(search_paths=[str(path) for path in sources])
    for top in dict.fromkeys(package.partition(".")[0] for package in PACKAGES):
        loader.load(top)
    loader.resolve_aliases()
    return names_of(loader.modules_collection[package] for package in PACKAGES)


def names_of(packages: Iterable[griffe.Module]) -> dict[str, Name]:
    """Return the promised names of packages and their modules, including names that only `moved` still provides."""
    found: dict[str, Name] = {}
    for package in packages:
        for module in _modules(package):
            wanted, gone = [str(name) for name in module.exports or ()], _moved(module)
            if module.path == HOOKS:
                wanted = [name for name in module.members if name.startswith("enginehouse_")]
            for name in dict.fromkeys([*wanted, *gone]):
                if name not in NOT_FOR_PLUGINS.get(module.path, ()):
                    promised_object = module.modules_collection[gone[name]] if name in gone else module[name]
                    found |= _names(f"{module.path}.{name}", promised_object)
    return found


def changes(before: Mapping[str, Any], today: Mapping[str, Name]) -> tuple[list[str], list[str]]:
    """Return the additions to a snapshot's names, and the breaking changes to them, one line each."""
    added = [address for address in today if address not in before and not _breaks(address, today, before)]
    broken = [f"{address} is new, and plugins that there are lack it" for address in today
              if address not in before and _breaks(address, today, before)]  # fmt: skip
    for address, entry in before.items():
        if address not in today:
            broken.append(f"{address} is gone")
        elif (was := entry.get("decorators", [])) != list(today[address].decorators):
            now = today[address].decorators
            broken.append(f"{address} was decorated with {', '.join(was) or 'nothing'} and is with {', '.join(now)}")
        elif entry["says"] != today[address].says:
            if _only_more(address, entry, today[address]):
                added.append(address)
            else:
                broken.append(f"{address} was {entry['says']} and is {today[address].says}")
    return added, broken


def problem(snapshot: Mapping[str, Any], today: Mapping[str, Name], contract: tuple[int, int] = CONTRACT) -> str:
    """Describe the changes that the contract's version does not allow yet; empty if there are none."""
    written, published = _version(snapshot["contract"]), _version(snapshot.get("published", snapshot["contract"]))
    names = snapshot["names"]
    still_open = {address for address, entry in names.items() if _version(entry["since"]) > published}
    fixed = {address: name for address, name in today.items() if not {address, name.owner} & still_open}
    added, broken = changes({address: entry for address, entry in names.items() if address not in still_open}, fixed)
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
    """Return the snapshot to keep. Names that it had keep their version.

    Names that came after the last published version (which `make version` writes) may still change.
    """
    known, version = before.get("names", {}), ".".join(map(str, CONTRACT))
    names: dict[str, dict[str, Any]] = {}
    for address, name in sorted(today.items()):
        since = known[address]["since"] if address in known else version
        names[address] = {"since": since} | entry_of(name)
    return {"contract": version, "published": before.get("published", version), "names": names}


def promised(today: Mapping[str, Name]) -> str:
    """Return the text of `PROMISED`."""
    found: dict[str, list[str]] = {}
    for address, name in sorted(today.items()):
        if not name.owner:
            found.setdefault(address.rpartition(".")[0], []).append(address.rpartition(".")[2])
    return json.dumps(found, indent=0) + "\n"


def entry_of(name: Name) -> dict[str, Any]:
    """Return a name's entry in the snapshot."""
    lists = {"arguments": list(name.arguments), "decorators": list(name.decorators)}
    return {"says": name.says} | {key: values for key, values in lists.items() if values}


def is_function(says: str) -> bool:
    """Return True if `says` belongs to a function or a method."""
    return says.startswith(("(", "async ("))


def kept() -> dict[str, Any]:
    """Return the stored snapshot."""
    return json.loads(SNAPSHOT.read_text(encoding="utf-8")) if SNAPSHOT.exists() else {}


def _modules(module: Any) -> Iterator[griffe.Module]:
    yield module
    for member in module.members.values():
        if not member.is_alias and member.is_module:
            yield from _modules(member)


def _names(address: str, found: Any) -> Iterator[tuple[str, Name]]:
    """Yield a name and, if it is a class, its members."""
    target = found.final_target if found.is_alias else found
    yield address, _name(target)
    if not target.is_class:
        return
    for name, member in target.all_members.items():
        special = name.startswith("__") and member.is_function and name not in NOT_PROMISED
        private = name.startswith("_") and not special
        outside = not member.path.startswith(("enginehouse.", "enginehouse_"))
        if not private and not outside and (member.is_function or member.is_attribute) and name != "model_config":
            yield f"{address}.{name}", _name(member.final_target if member.is_alias else member, address)


def _moved(module: Any) -> dict[str, str]:
    """Return the names that a module provides only by `moved`, and the new import path of each."""
    value: Any = module.members["__getattr__"].value if "__getattr__" in module.attributes else None
    if not isinstance(value, griffe.ExprCall) or str(value.function) != "moved":
        return {}
    call: Any = ast.parse(str(value), mode="eval").body
    table = call.args[1]
    return {name.value: to.elts[0].value.replace(":", ".") for name, to in zip(table.keys, table.values, strict=True)}


def _name(found: Any, owner: str = "") -> Name:
    text = found.docstring.value if found.docstring else ""
    decorators = () if found.is_attribute else tuple(_value(decorator.value) for decorator in found.decorators)
    if found.is_class:
        bases = f"class({', '.join(str(base) for base in found.bases)})"
        return Name(bases, text=text, decorators=decorators, defined=found.path)
    if found.is_attribute:
        kind = str(found.annotation) if found.annotation is not None else ""
        value = "" if found.value is None else f" = {_value(found.value)}"
        says = "property: " + kind if "property" in found.labels else (kind + value).strip()
        return Name(says, text=text, owner=owner, defined=found.path)
    arguments = tuple(_argument(parameter) for parameter in found.parameters if parameter.name not in ("self", "cls"))
    returns = f" -> {found.returns}" if found.returns is not None else ""
    kept_async = "async " if "async" in found.labels else ""
    return Name(f"{kept_async}({', '.join(arguments)}){returns}", arguments, text, owner, decorators, found.path)


def _value(value: Any) -> str:
    """Return a default or a decorator as written, without arguments that change nothing for a plugin."""
    if not isinstance(value, griffe.ExprCall) or (function := str(value.function)) not in NOT_MEANT:
        return str(value)
    left_out = NOT_MEANT[function]
    arguments: list[Any] = [argument for argument in value.arguments if getattr(argument, "name", "") not in left_out]
    if function == "field" and [getattr(argument, "name", "") for argument in arguments] == ["default"]:
        return str(arguments[0].value)
    bare = function == "hookspec" and not arguments
    return function if bare else f"{function}({', '.join(map(str, arguments))})"


def _argument(parameter: Any) -> str:
    stars = {griffe.ParameterKind.var_positional: "*", griffe.ParameterKind.var_keyword: "**"}
    kind = f": {parameter.annotation}" if parameter.annotation is not None else ""
    variable = parameter.kind in stars
    default = "" if parameter.default is None or variable else f" = {parameter.default}"
    only = "*, " if parameter.kind is griffe.ParameterKind.keyword_only else ""
    before = ", /" if parameter.kind is griffe.ParameterKind.positional_only else ""
    return f"{only}{stars.get(parameter.kind, '')}{parameter.name}{kind}{default}{before}"


def _breaks(address: str, today: Mapping[str, Name], before: Mapping[str, Any]) -> bool:
    """Return True if existing plugins would have to provide a new name, such as a method or a field."""
    name = today[address]
    if name.owner not in before:
        return False
    if name.owner.rpartition(".")[2] in IMPLEMENTED:
        return True
    if address.endswith(".__init__"):
        return not all(map(_optional, name.arguments))
    field_without = not is_function(name.says) and not name.says.startswith("property: ") and " = " not in name.says
    told_by_init = f"{name.owner}.__init__" in before  # it has the new field as an argument
    return field_without and not told_by_init and "Protocol" not in today[name.owner].says


def _only_more(address: str, entry: Mapping[str, Any], name: Name) -> bool:
    """Return True if a function only accepts more arguments: last or by keyword, with defaults; for a hook, any. A
    `Literal` of `GUARDED` may have more values."""
    if address in GUARDED:
        return name.says.startswith(entry["says"].removesuffix("]") + ", ")
    before, now, said = entry.get("arguments", []), list(name.arguments), entry["says"]
    if not (is_function(said) and is_function(name.says)) or name.owner.rpartition(".")[2] in IMPLEMENTED:
        return False
    if (said.partition("(")[0], said.rpartition(")")[2]) != (name.says.partition("(")[0], name.says.rpartition(")")[2]):
        return False
    more = [argument for argument in now if argument not in before]
    if not set(before) <= set(now) or address.startswith(f"{HOOKS}."):
        return set(before) <= set(now)
    ordered = [argument for argument in before if not argument.startswith(("*, ", "**"))]
    return now[: len(ordered)] == ordered and all(map(_optional, more))


def _optional(argument: str) -> bool:
    return " = " in argument or (argument.startswith("*") and not argument.startswith("*, "))


def _lines(of: list[str]) -> str:
    return "".join(f"\n  {line}" for line in of)
