"""Whether what a record names is there, and can be what it is declared as. It is imported to find out."""

from __future__ import annotations

import inspect
from typing import Any

from enginehouse.engines.rollout import RolloutEngine
from enginehouse.engines.train import OffloadsState, SavesInBackground, TrainEngine, TrainsAdapters
from enginehouse.engines.weights import WeightTransport
from enginehouse.plugin import Backend, Record, ResolveError, RolloutBackend, TrainBackend, Transport, resolve
from enginehouse.plugin.capabilities import BACKGROUND_SAVE, LORA, OFFLOAD
from enginehouse.plugin.requirements import unmet

PROTOCOLS: dict[type[Record], tuple[str, type]] = {
    TrainBackend: ("engine", TrainEngine),
    RolloutBackend: ("engine", RolloutEngine),
    Transport: ("transport", WeightTransport),
}
"""By kind of record the field that names a class, and what that class must do."""

OFFERED: dict[str, type] = {OFFLOAD: OffloadsState, BACKGROUND_SAVE: SavesInBackground, LORA: TrainsAdapters}
"""What a training engine must do besides, by capability."""


def problems_of(record: Record) -> list[str]:
    """What is wrong with the things that a record names by strings; empty where nothing is.

    The engine of a backend whose requirements are missing here lives in another Python environment: it is passed over.
    """
    what = f"{record.kind} {record.name!r}"
    field, protocol = PROTOCOLS.get(type(record), ("", object))
    found = []
    for name in record.references:
        if name == "engine" and isinstance(record, Backend) and any(unmet(record.requires)):
            continue
        try:
            named = resolve(getattr(record, name))
        except ResolveError as error:
            found.append(f"{what}: {name}: {error}")
            continue
        if name == field:
            found += [f"{what}: {name} {getattr(record, name)!r} {said}" for said in _unlike(named, protocol, record)]
        elif not callable(named):
            found.append(f"{what}: {name} {getattr(record, name)!r} is {named!r}, which cannot be called")
    return found


def _unlike(named: Any, protocol: type, record: Record) -> list[str]:
    """What a class lacks of a protocol, and of those that a record's capabilities add."""
    if not inspect.isclass(named):
        return [f"is {named!r}, not a class"]
    wanted = [protocol]
    if isinstance(record, TrainBackend):
        wanted += [OFFERED[one] for one in sorted(record.capabilities) if one in OFFERED]
    lacking = [name for one in wanted for name in methods(one) if not callable(getattr(named, name, None))]
    return [f"lacks {', '.join(lacking)}"] if lacking else []


def methods(protocol: type) -> list[str]:
    """Names of a protocol's methods."""
    return [name for name, value in vars(protocol).items() if inspect.isfunction(value) and not name.startswith("_")]
