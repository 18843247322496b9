"""Why a name cannot be used: the error for each case, with what the user can do about it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from enginehouse.errors import nearest
from enginehouse.plugin.errors import PluginLookupError
from enginehouse.plugin.first_party import OF_KIND, find_not_installed, pip_line
from enginehouse.plugin.loaded import Plugin, Provided, is_same_distribution
from enginehouse.plugin.records import Record
from enginehouse.plugin.requirements import Missing, install_line

LABELS = {"train": "training backend", "rollout": "rollout backend", "transport": "weight transport"}


def label(kind: str | None) -> str:
    """A kind of record in words; None: a backend, for training or rollout."""
    if kind is None:
        return "backend"
    return LABELS.get(kind, kind.replace("_", " "))


def split_name(name: str) -> tuple[str | None, str]:
    """Split `"distribution:name"`; None where only a name is given."""
    distribution, colon, rest = name.rpartition(":")
    return (distribution, rest) if colon else (None, name)


def ambiguous_error(kind: str, name: str, providers: Sequence[Provided]) -> PluginLookupError:
    """Several distributions provide the name."""
    owners = sorted({provided.plugin.distribution for provided in providers})
    choices = " or ".join(f"'{owner}:{name}'" for owner in owners)
    return PluginLookupError(
        f"{label(kind)} {name!r} is provided by {' and '.join(owners)}; write {choices}", "ambiguous"
    )


def requirements_error(record: Record, plugin: Plugin, missing: Sequence[Missing]) -> PluginLookupError:
    """The plugin is installed, what its engine, tracker or function needs is not."""
    own = f"enginehouse runtime create {record.name}" if getattr(record, "runtimes", ()) else ""
    return PluginLookupError(
        f"{label(record.kind)} {record.name!r} is installed ({plugin}), but {'; '.join(map(str, missing))}. "
        f"Try: {own or install_line(missing, plugin.distribution)}",
        "requirements missing",
    )


def not_found_error(
    kind: str | None, asked: str, plugins: Iterable[Plugin], provided: Sequence[Provided]
) -> PluginLookupError:
    """Nothing usable has the name: a plugin that would have it is not loaded, not installed, or there is none.

    Args:
        kind: of record; None: a backend, for training or rollout.
        asked: the name, or `"distribution:name"`.
        plugins: all there are.
        provided: what there is to choose from.
    """
    distribution, name = split_name(asked)
    known = list(plugins)
    for plugin in known:
        if plugin.status != "ok" and _may_provide(plugin, kind, distribution, name):
            return _not_loaded(kind, asked, plugin)
    installable = find_not_installed(known, kind) if kind in (None, "train", "rollout", *OF_KIND) else []
    if name in installable:
        return PluginLookupError(f"{label(kind)} {asked!r} is not installed. Try: {pip_line(name)}", "not installed")
    choices = {one.record.name for one in provided if one.record.kind == kind}
    said = [f"no {label(kind)} {asked!r}; {nearest(name, choices)}"]
    others = sorted({one.record.kind for one in provided if one.record.name == name and one.record.kind != kind})
    if others:
        said.append(f"{name!r} names something else: {', '.join(label(other) for other in others)}.")
    if installable:
        said.append(f"Not installed: {', '.join(f'{name} ({pip_line(name)})' for name in installable)}.")
    unloaded = [f"{plugin.name} ({plugin.status})" for plugin in known if plugin.status != "ok"]
    if unloaded:
        said.append(f"Plugins that were not loaded: {', '.join(unloaded)}; see `enginehouse plugins list`.")
    return PluginLookupError(". ".join([said[0], " ".join(said[1:])]) if said[1:] else said[0], "unknown")


def unknown_name_error(name: str, plugins: Sequence[Plugin], provided: Sequence[Provided]) -> PluginLookupError:
    """Neither a plugin nor a distribution nor a record has the name: as for a backend that is not loaded, else with
    every name as a choice."""
    error = not_found_error(None, name, plugins, ())
    if error.reason != "unknown":
        return error
    names = {plugin.name for plugin in plugins} | {one.record.name for one in provided}
    return PluginLookupError(f"nothing is called {name!r}; {nearest(name, names)}", "unknown")


def _may_provide(plugin: Plugin, kind: str | None, distribution: str | None, name: str) -> bool:
    if distribution is not None and not is_same_distribution(distribution, plugin.distribution):
        return False
    kinds = ("train", "rollout") if kind is None else (kind,)
    return distribution is not None or any((one, name) in plugin.withdrawn for one in kinds) or plugin.answers_to(name)


def _not_loaded(kind: str | None, asked: str, plugin: Plugin) -> PluginLookupError:
    message = (
        f"{label(kind)} {asked!r}: plugin {plugin.name!r} ({plugin}) is installed but {plugin.status}: {plugin.problem}"
    )
    if plugin.traceback:
        message += "\n" + textwrap.indent(plugin.traceback.rstrip(), "    ")
    assert plugin.status != "ok"
    return PluginLookupError(message, plugin.status)
