"""Errors for names that cannot be used. They tell the user what to do."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from enginehouse.errors import nearest
from enginehouse.plugin.errors import PluginLookupError
from enginehouse.plugin.first_party import OF_KIND, find_not_installed, pip_line
from enginehouse.plugin.loaded import Plugin, Provided, is_same_distribution
from enginehouse.plugin.records import Record
from enginehouse.plugin.requirements import Missing, install_line

LABELS = {"train": "training engine", "rollout": "rollout engine", "transport": "weight transport"}


def label(kind: str | None) -> str:
    """Return the words for a kind of record, such as `"training engine"`. None means an engine for training or
    rollout."""
    if kind is None:
        return "engine"
    return LABELS.get(kind, kind.replace("_", " "))


def split_name(name: str) -> tuple[str | None, str]:
    """Split `"distribution:name"`. The distribution is None if only a name is given."""
    distribution, colon, plain = name.rpartition(":")
    return (distribution, plain) if colon else (None, name)


def ambiguous_error(kind: str, name: str, providers: Sequence[Provided]) -> PluginLookupError:
    """Return the error for a name that several distributions provide."""
    owners = sorted({provided.plugin.distribution for provided in providers})
    choices = " or ".join(f"'{owner}:{name}'" for owner in owners)
    return PluginLookupError(
        f"{label(kind)} {name!r} is provided by {' and '.join(owners)}; write {choices}", "ambiguous"
    )


def requirements_error(record: Record, plugin: Plugin, missing: Sequence[Missing]) -> PluginLookupError:
    """Return the error for an installed plugin whose engine, tracker or function lacks requirements."""
    return PluginLookupError(
        f"{label(record.kind)} {record.name!r} is installed ({plugin}), but {'; '.join(map(str, missing))}. "
        f"Try: {cure_line(record, plugin, missing)}",
        "requirements missing",
    )


def cure_line(record: Record, plugin: Plugin, missing: Sequence[Missing]) -> str:
    """Return the command that provides the missing requirements of a record."""
    if getattr(record, "runtimes", ()):
        return f"enginehouse runtime create {record.name}"
    return install_line(missing, plugin.distribution)


def not_found_error(
    kind: str | None, asked: str, plugins: Iterable[Plugin], provided: Sequence[Provided]
) -> PluginLookupError:
    """Return the error for a name that no usable record has: its plugin is not loaded, not installed, or unknown.

    Args:
        kind: kind of record; None: an engine for training or rollout.
        asked: the name, or `"distribution:name"`.
    """
    distribution, name = split_name(asked)
    installed = list(plugins)
    for plugin in installed:
        if plugin.status != "ok" and _may_provide(plugin, kind, distribution, name):
            return _not_loaded_error(kind, asked, plugin)
    installable = find_not_installed(installed, kind) if kind in (None, "train", "rollout", *OF_KIND) else []
    if name in installable:
        return PluginLookupError(f"{label(kind)} {asked!r} is not installed. Try: {pip_line(name)}", "not installed")
    records = [record for record, _ in provided]
    choices = {record.name for record in records if record.kind == kind}
    message = f"unknown {label(kind)} {asked!r}. {nearest(name, choices)}"
    hints = []
    if kinds := sorted({record.kind for record in records if record.name == name and record.kind != kind}):
        hints.append(f"{name!r} is another kind of record: {', '.join(label(other_kind) for other_kind in kinds)}.")
    if installable:
        hints.append(f"Not installed: {', '.join(f'{name} ({pip_line(name)})' for name in installable)}.")
    if unloaded := [f"{plugin.name} ({plugin.status})" for plugin in installed if plugin.status != "ok"]:
        hints.append(f"Plugins that were not loaded: {', '.join(unloaded)}; see `enginehouse plugins list`.")
    return PluginLookupError(f"{message}. {' '.join(hints)}" if hints else message, "unknown")


def unknown_name_error(name: str, plugins: Sequence[Plugin], provided: Sequence[Provided]) -> PluginLookupError:
    """Return the error for a name that no plugin, distribution or record has. If it is the name of an engine that is
    not loaded, the error says why. Otherwise the error suggests names of plugins and records."""
    error = not_found_error(None, name, plugins, ())
    if error.reason != "unknown":
        return error
    names = {plugin.name for plugin in plugins} | {record.name for record, _ in provided}
    message = f"unknown name {name!r}. {nearest(name, names)}. `enginehouse plugins list` lists all names"
    return PluginLookupError(message, "unknown")


def _may_provide(plugin: Plugin, kind: str | None, distribution: str | None, name: str) -> bool:
    if distribution is not None and not is_same_distribution(distribution, plugin.distribution):
        return False
    kinds = ("train", "rollout") if kind is None else (kind,)
    withdrawn = any((kind, name) in plugin.withdrawn for kind in kinds)
    return distribution is not None or withdrawn or plugin.answers_to(name)


def _not_loaded_error(kind: str | None, asked: str, plugin: Plugin) -> PluginLookupError:
    message = (
        f"{label(kind)} {asked!r}: plugin {plugin.name!r} ({plugin}) is installed but {plugin.status}: {plugin.problem}"
    )
    if plugin.traceback:
        message += "\n" + textwrap.indent(plugin.traceback.rstrip(), "    ")
    assert plugin.status != "ok"
    return PluginLookupError(message, plugin.status)
