"""Plugins that belong to enginehouse: what core's metadata says of them, and the line that installs one."""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from urllib.parse import urlparse
from urllib.request import url2pathname

from enginehouse.plugin.loaded import CORE, Plugin, canonical_name
from enginehouse.plugin.requirements import installed_version

TOOLS = {
    "environments": (),
    "recipes": ("init", "recipes"),
    "report": ("bottleneck", "report", "watch"),
    "rewards": (),
    "rl": ("dpo", "eval", "keys", "plan", "rm", "sft", "train"),
    "testing": ("certify", "matrix", "new-plugin", "parity", "plugins doctor"),
    "transports": (),
}
"""Core's extras that bring no backend, and the commands that they bring."""

OF_KIND = {"environment": "environments", "transport": "transports"}
"""The extra that brings records of a kind; one of another kind, or of none, is a backend's."""


def own_distributions() -> set[str]:
    """Return the distributions of enginehouse's own plugins, installed or not, as core's extras name them."""
    from packaging.requirements import Requirement

    try:
        requirements = [Requirement(text) for text in metadata.requires(CORE) or ()]
    except metadata.PackageNotFoundError:
        return set()
    return {canonical_name(one.name) for one in requirements if one.name.startswith(f"{CORE}-")}


def find_not_installed(known: Iterable[Plugin], kind: str | None = None) -> list[str]:
    """Core's extras whose plugin is not installed; core's metadata alone names them.

    Args:
        known: plugins there are.
        kind: of record, as `OF_KIND` has it: those that bring such; else those that bring a backend.
    """
    own = own_distributions()
    there = {
        canonical_name(name) for plugin in known for name in (plugin.distribution, plugin.module.partition(".")[0])
    }
    return [
        extra
        for extra in (metadata.metadata(CORE).get_all("Provides-Extra") or () if own else ())
        if (extra == OF_KIND[kind] if kind in OF_KIND else extra not in TOOLS) and f"{CORE}-{extra}" in own - there
    ]


def pip_line(name: str) -> str:
    """The line that installs the plugin of one of core's extras, from where core came from: a checkout, or an index."""
    return "pip install " + " ".join(f'"{one}"' if "[" in one else one for one in plugin_source(name)[0])


def plugin_source(name: str) -> tuple[list[str], str]:
    """pip's arguments for the plugin of an extra, and where that is, in words."""
    checkout = _checkout()
    folders = _with_what_it_needs(checkout / "plugins", name) if checkout is not None else []
    if folders:
        return [str(folder) for folder in folders], f"from {folders[-1]}"
    version = metadata.version(CORE)
    return [f"{CORE}[{name}]=={version}"], f"{CORE}[{name}]=={version} from the package index"


def _with_what_it_needs(plugins: Path, name: str) -> list[Path]:
    """The folders of a plugin and, before it, of those it requires that are not there; none of one that has none."""
    import tomllib

    from packaging.requirements import Requirement

    project = plugins / name / "pyproject.toml"
    if not project.is_file():
        return []
    dependencies = tomllib.loads(project.read_text(encoding="utf-8")).get("project", {}).get("dependencies", [])
    required = [Requirement(text).name for text in dependencies]
    ours = [one.removeprefix(f"{CORE}-") for one in required if one.startswith(f"{CORE}-")]
    missing = [one for one in ours if installed_version(f"{CORE}-{one}") is None]
    folders = [folder for one in missing for folder in _with_what_it_needs(plugins, one)]
    return [*dict.fromkeys(folders), project.parent]


def _checkout() -> Path | None:
    """The checkout core was installed from, by what pip noted (PEP 610); None if it was not from a folder here."""
    try:
        noted = metadata.distribution(CORE).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return None
    url = urlparse(json.loads(noted)["url"]) if noted else None
    if url is None or url.scheme != "file":
        return None
    return Path(url2pathname(url.path)).parent
