"""The plugins of enginehouse that core's metadata names, and the command that installs such a plugin."""

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
"""Core's extras without an engine, and the commands that they add."""

OF_KIND = {"environment": "environments", "transport": "transports"}
"""Extra that adds records of each of these kinds. Records of all other kinds come with the extra of an engine."""


def own_distributions() -> set[str]:
    """Return the names of the distributions of enginehouse's own plugins, installed or not, from core's metadata."""
    from packaging.requirements import Requirement

    try:
        requirements = [Requirement(text) for text in metadata.requires(CORE) or ()]
    except metadata.PackageNotFoundError:
        return set()
    names = (requirement.name for requirement in requirements)
    return {canonical_name(name) for name in names if name.startswith(f"{CORE}-")}


def find_not_installed(known: Iterable[Plugin], kind: str | None = None) -> list[str]:
    """Return core's extras whose plugin is not installed, from core's metadata.

    Args:
        known: the installed plugins.
        kind: kind of record. For a key of `OF_KIND`, only the extra of that kind is returned; otherwise only the extras
            of engines.
    """
    distributions = own_distributions()
    present = {
        canonical_name(name) for plugin in known for name in (plugin.distribution, plugin.module.partition(".")[0])
    }
    return [
        extra
        for extra in (metadata.metadata(CORE).get_all("Provides-Extra") or () if distributions else ())
        if (extra == OF_KIND[kind] if kind in OF_KIND else extra not in TOOLS)
        and f"{CORE}-{extra}" in distributions - present
    ]


def pip_line(name: str) -> str:
    """Return the command that installs the plugin of an extra from the source of core: a checkout or an index."""
    return "pip install " + " ".join(f'"{text}"' if "[" in text else text for text in plugin_source(name)[0])


def plugin_source(name: str) -> tuple[list[str], str]:
    """Return pip's arguments for the plugin of an extra, and a description of the source."""
    checkout = _checkout()
    folders = _list_folders(checkout / "plugins", name) if checkout is not None else []
    if folders:
        return [str(folder) for folder in folders], f"from {folders[-1]}"
    version = metadata.version(CORE)
    return [f"{CORE}[{name}]=={version}"], f"{CORE}[{name}]=={version} from the package index"


def _list_folders(plugins: Path, name: str) -> list[Path]:
    """Return the folders of a plugin's missing dependencies and then its own folder. Empty if there is no such
    plugin."""
    import tomllib

    from packaging.requirements import Requirement

    project = plugins / name / "pyproject.toml"
    if not project.is_file():
        return []
    dependencies = tomllib.loads(project.read_text(encoding="utf-8")).get("project", {}).get("dependencies", [])
    required = [Requirement(text).name for text in dependencies]
    siblings = [distribution for distribution in required if distribution.startswith(f"{CORE}-")]
    missing = [distribution for distribution in siblings if installed_version(distribution) is None]
    names = [distribution.removeprefix(f"{CORE}-") for distribution in missing]
    folders = [folder for name in names for folder in _list_folders(plugins, name)]
    return [*dict.fromkeys(folders), project.parent]


def _checkout() -> Path | None:
    """Return the checkout from which core was installed, as pip recorded it (PEP 610); None if core was not installed
    from a checkout."""
    try:
        record = metadata.distribution(CORE).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return None
    url = urlparse(json.loads(record)["url"]) if record else None
    if url is None or url.scheme != "file":
        return None
    return Path(url2pathname(url.path)).parent
