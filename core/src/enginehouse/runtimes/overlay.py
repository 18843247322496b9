"""An overlay: a folder of links to the driver's core and plugins, from which a worker in another runtime imports them.

The driver and its workers therefore run the same core, installed from a wheel or editable. A changed plugin needs no
new runtime. The folder comes first in the worker's `PYTHONPATH`. It does not contain the driver's other packages, which
the worker must not import.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from enginehouse.plugin.discovery import find_entry_points
from enginehouse.plugin.loaded import CORE
from enginehouse.runtimes.store import clear, runtimes_folder

KEPT_SECONDS = 86400.0
"""Time in seconds for which an overlay with dead links is kept after a program last began to use it."""


@dataclass(frozen=True, slots=True)
class Overlay:
    """A folder of links. `links` maps the name of each link to its target."""

    path: Path
    links: Mapping[str, str]


def make_overlay() -> Overlay:
    """Return the overlay of this process's core and plugins, and make it if it does not exist."""
    links = _links()
    key = hashlib.sha256(json.dumps(links, sort_keys=True).encode()).hexdigest()[:16]
    path = runtimes_folder() / ".overlays" / key
    with suppress(OSError):  # it does not exist yet, or belongs to another user
        os.utime(path)
    if not path.is_dir():
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{key}-", dir=path.parent))
        draft.chmod(0o755)
        for name, target in links.items():
            (draft / name).symlink_to(target)
        try:
            os.rename(draft, path)
        except OSError:  # another process was first
            clear(draft)
            if not path.is_dir():
                raise
        _remove_dead(path.parent)
    return Overlay(path, links)


def _remove_dead(overlays: Path) -> None:
    """Remove overlays with dead links that no program has begun to use within `KEPT_SECONDS`."""
    for path in overlays.iterdir():
        with suppress(OSError):  # another process was first
            dead = any(not link.exists() for link in path.iterdir())
            if dead and time.time() - path.stat().st_mtime > KEPT_SECONDS:
                clear(path)


def _links() -> dict[str, str]:
    links = _module_links(CORE)
    distributions: dict[str, metadata.Distribution] = {}
    with suppress(metadata.PackageNotFoundError):  # core runs from its source
        distributions[CORE] = metadata.distribution(CORE)
    for entry_point in find_entry_points():
        links |= _module_links(entry_point.module.partition(".")[0])
        if entry_point.dist is not None:
            distributions.setdefault(entry_point.dist.name, entry_point.dist)
    for distribution in distributions.values():
        site = Path(str(distribution.locate_file("")))
        stem = distribution.name.replace("-", "_")
        for information in (*site.glob(f"{stem}-{distribution.version}.*-info"), *site.glob(f"{stem}.egg-info")):
            links[information.name] = str(information.resolve())
        for file in distribution.files or ():
            top = file.parts[0]
            if len(file.parts) > 1 and file.parts[1] == "__init__.py":
                links |= _module_links(top)
    return dict(sorted(links.items()))


def _module_links(module: str) -> dict[str, str]:
    """Return the link to a top-level module as name and target. The target is the path from which this process would
    import the module. Empty if the module is not found."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        spec = None
    if spec is None:  # a plugin that is broken here is also broken there, and this process reports it
        return {}
    if spec.submodule_search_locations:
        return {module: str(Path(next(iter(spec.submodule_search_locations))).resolve())}
    return {Path(spec.origin).name: str(Path(spec.origin).resolve())} if spec.origin else {}
