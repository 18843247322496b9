"""Imports the objects that the import paths in a plugin's record name, and checks that each has the declared kind."""

from __future__ import annotations

import inspect
import os
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

from enginehouse.engines.environment import Environment as EnvironmentProtocol
from enginehouse.engines.rollout import RolloutEngine
from enginehouse.engines.tracker import Tracker as TrackerProtocol
from enginehouse.engines.train import OffloadsState, SavesInBackground, SendsAdapters, TrainEngine, TrainsAdapters
from enginehouse.engines.weights import WeightTransport
from enginehouse.plugin import (
    Advantage,
    Backend,
    Environment,
    Filter,
    Loss,
    Record,
    ResolveError,
    RolloutBackend,
    Stage,
    Tracker,
    TrainBackend,
    Transport,
    resolve,
)  # fmt: skip
from enginehouse.plugin.capabilities import ADAPTER_UPDATES, BACKGROUND_SAVE, LORA, OFFLOAD
from enginehouse.plugin.references import find_mismatched_methods, find_missing_methods
from enginehouse.plugin.requirements import find_missing

PROTOCOLS: dict[type[Record], tuple[str, type]] = {
    TrainBackend: ("engine", TrainEngine),
    RolloutBackend: ("engine", RolloutEngine),
    Transport: ("transport", WeightTransport),
    Tracker: ("tracker", TrackerProtocol),
    Environment: ("environment", EnvironmentProtocol),
}
"""By kind of record, the field that names a class and the protocol that the class must implement."""

OFFERED: dict[str, type] = {
    ADAPTER_UPDATES: SendsAdapters,
    BACKGROUND_SAVE: SavesInBackground,
    LORA: TrainsAdapters,
    OFFLOAD: OffloadsState,
}
"""By capability, the further protocol that a training engine must implement."""

GIVEN: dict[type[Record], int] = {Advantage: 1, Loss: 1, Filter: 1, Stage: 1}
"""By kind of record, the number of positional arguments that its function gets."""


@dataclass(frozen=True, slots=True)
class Fault:
    """An error in an object that a record names.

    Attributes:
        what: description that begins with the kind and the name of the record.
        where: place as `"FILE:LINE"`, or `"FILE"` if the line is unknown.
    """

    what: str
    where: str = ""


def find_faults(record: Record, declared_at: str = "") -> Iterator[Fault]:
    """Yield the faults of the objects that a record names.

    An engine or a function is not checked if this Python environment lacks its requirements. Such an engine runs in
    another environment, and another check reports such a function.

    Args:
        declared_at: place where the record was declared.
    """
    what = f"{record.kind} {record.name!r}"
    field, _ = PROTOCOLS.get(type(record), ("", object))
    for name in record.references:
        if name in ("engine", "function") and any(find_missing(getattr(record, "requires", ()))):
            continue
        reference = getattr(record, name)
        try:
            target = resolve(reference)
        except ResolveError as error:
            yield Fault(f"{what}: {name}: {error}", _raised_at(error) or declared_at)
            continue
        place = locate(target)
        if not place.startswith(os.path.dirname(declared_at)):
            place = declared_at  # the mistake is the declaration, not foreign code
        if name == field:
            for deviation in find_protocol_faults(target, protocols_of(record)):
                yield Fault(f"{what}: {name} {reference!r} {deviation}", place)
        elif not callable(target):
            yield Fault(f"{what}: {name} {reference!r} is {target!r}, which cannot be called", declared_at)
        elif name == "options" and isinstance(record, Backend):
            for deviation in _find_options_faults(target, record):
                yield Fault(f"{what}: {name} {reference!r} {deviation}", place)
        elif not _accepts(target, GIVEN.get(type(record), 0)):
            takes = f"must take one argument, but takes {inspect.signature(target)}"
            yield Fault(f"{what}: {name} {reference!r} {takes}", place)


def protocols_of(record: Record) -> list[type]:
    """Return the protocols that the class of a record must implement: by its kind, and by each of its capabilities."""
    protocols = [PROTOCOLS[type(record)][1]] if type(record) in PROTOCOLS else []
    if isinstance(record, TrainBackend):
        protocols += [OFFERED[capability] for capability in sorted(record.capabilities) if capability in OFFERED]
    return protocols


def find_protocol_faults(target: Any, protocols: Iterable[type]) -> Iterator[str]:
    """Yield the deviations of a class from its protocols, as text that follows the name of the class."""
    if not isinstance(target, type):
        yield f"must be a class, but is {getattr(target, '__qualname__', repr(target))}, a {type(target).__name__}"
        return
    capabilities = {protocol: capability for capability, protocol in OFFERED.items()}
    for protocol in protocols:
        if missing := find_missing_methods(target, protocol):
            by = f", which its capability {capabilities[protocol]!r} promises" if protocol in capabilities else ""
            yield f"does not implement {protocol.__name__}: it lacks {', '.join(missing)}{by}"
        for mismatch in find_mismatched_methods(target, protocol):
            yield f"does not implement {protocol.__name__}: {mismatch}"


def _find_options_faults(target: Any, record: Backend) -> Iterator[str]:
    from enginehouse.engines.options import RolloutOptions, TrainOptions

    base = TrainOptions if isinstance(record, TrainBackend) else RolloutOptions
    if not (isinstance(target, type) and issubclass(target, base)):
        yield f"is not derived from {base.__module__}:{base.__name__}"
    elif LORA in record.capabilities and "lora" not in target.model_fields:
        yield f"has no option 'lora', which the capability {LORA!r} promises"


def _accepts(function: Any, positional: int) -> bool:
    try:
        inspect.signature(function).bind_partial(*[None] * positional)
    except TypeError:
        return False
    except ValueError:  # a function in C may have no signature
        return True
    return True


def locate(target: Any) -> str:
    """Return file and line of an imported object; empty if unknown."""
    code = getattr(inspect.unwrap(target), "__code__", None) if callable(target) else None
    if isinstance(code, CodeType):
        return f"{code.co_filename}:{code.co_firstlineno}"
    try:
        return f"{inspect.getsourcefile(target)}:{inspect.getsourcelines(target)[1]}"
    except (TypeError, OSError):
        return ""


def _raised_at(error: ResolveError) -> str:
    """Return the place where importing a module failed; empty if the import did not begin."""
    cause = error.__cause__
    if isinstance(cause, SyntaxError):
        return f"{cause.filename}:{cause.lineno}"
    skipped = ("importlib", resolve.__code__.co_filename)
    frames = traceback.extract_tb(cause.__traceback__) if cause else []
    own = [frame for frame in frames if not any(name in frame.filename for name in skipped)]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else ""
