"""Whether what a record names is there, and can be what it is declared as. It is imported to find out."""

from __future__ import annotations

from typing import Any

from enginehouse.engines.environment import Environment as EnvironmentProtocol
from enginehouse.engines.rollout import RolloutEngine
from enginehouse.engines.train import OffloadsState, SavesInBackground, TrainEngine, TrainsAdapters
from enginehouse.engines.weights import WeightTransport
from enginehouse.plugin import (
    Backend,
    Environment,
    Record,
    ResolveError,
    RolloutBackend,
    TrainBackend,
    Transport,
    resolve,
)
from enginehouse.plugin.capabilities import BACKGROUND_SAVE, LORA, OFFLOAD
from enginehouse.plugin.references import lacking
from enginehouse.plugin.requirements import unmet

PROTOCOLS: dict[type[Record], tuple[str, type]] = {
    TrainBackend: ("engine", TrainEngine),
    RolloutBackend: ("engine", RolloutEngine),
    Transport: ("transport", WeightTransport),
    Environment: ("environment", EnvironmentProtocol),
}
"""By kind of record the field that names a class, and what that class must do."""

OFFERED: dict[str, type] = {OFFLOAD: OffloadsState, BACKGROUND_SAVE: SavesInBackground, LORA: TrainsAdapters}
"""What a training engine must do besides, by capability."""


def problems_of(record: Record) -> list[str]:
    """What is wrong with the things that a record names by strings; empty where nothing is.

    The engine of a backend whose requirements are missing here lives in another Python environment: it is passed over.
    """
    what = f"{record.kind} {record.name!r}"
    field, _ = PROTOCOLS.get(type(record), ("", object))
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
            found += [f"{what}: {name} {getattr(record, name)!r} {said}" for said in _unlike(named, record)]
        elif not callable(named):
            found.append(f"{what}: {name} {getattr(record, name)!r} is {named!r}, which cannot be called")
    return found


def protocols_of(record: Record) -> list[type]:
    """What the class that a record names must do: by its kind, and by each of its capabilities."""
    wanted = [PROTOCOLS[type(record)][1]] if type(record) in PROTOCOLS else []
    if isinstance(record, TrainBackend):
        wanted += [OFFERED[one] for one in sorted(record.capabilities) if one in OFFERED]
    return wanted


def _unlike(named: Any, record: Record) -> list[str]:
    """What a class lacks of what its record says it does."""
    if not isinstance(named, type):
        return [f"is {named!r}, not a class"]
    missing = [name for protocol in protocols_of(record) for name in lacking(named, protocol)]
    return [f"lacks {', '.join(missing)}"] if missing else []
