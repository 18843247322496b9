"""Whether what a record names is there, and can be what it is declared as. It is imported to find out."""

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
from enginehouse.engines.train import OffloadsState, SavesInBackground, TrainEngine, TrainsAdapters
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
from enginehouse.plugin.capabilities import BACKGROUND_SAVE, LORA, OFFLOAD
from enginehouse.plugin.references import find_mismatched_methods, find_missing_methods
from enginehouse.plugin.requirements import find_missing

PROTOCOLS: dict[type[Record], tuple[str, type]] = {
    TrainBackend: ("engine", TrainEngine),
    RolloutBackend: ("engine", RolloutEngine),
    Transport: ("transport", WeightTransport),
    Tracker: ("tracker", TrackerProtocol),
    Environment: ("environment", EnvironmentProtocol),
}
"""By kind of record the field that names a class, and what that class must do."""

OFFERED: dict[str, type] = {OFFLOAD: OffloadsState, BACKGROUND_SAVE: SavesInBackground, LORA: TrainsAdapters}
"""What a training engine must do besides, by capability."""

GIVEN: dict[type[Record], int] = {Advantage: 1, Loss: 1, Filter: 1, Stage: 1}
"""By kind of record how many positional arguments the function that it names is given."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something wrong with what a record names.

    Attributes:
        what: in words, beginning with the record.
        where: file and line, `"FILE:LINE"`; the line is left out where it is not known.
    """

    what: str
    where: str = ""


def find_faults(record: Record, declared_at: str = "") -> Iterator[Fault]:
    """Yield what is wrong with the things that a record names by strings.

    An engine whose requirements are missing here lives in another Python environment: it is passed over, as is a
    function, of which that is said elsewhere.

    Args:
        record: any.
        declared_at: where it was declared.
    """
    what = f"{record.kind} {record.name!r}"
    field, _ = PROTOCOLS.get(type(record), ("", object))
    for name in record.references:
        if name in ("engine", "function") and any(find_missing(getattr(record, "requires", ()))):
            continue
        reference = getattr(record, name)
        try:
            named = resolve(reference)
        except ResolveError as error:
            yield Fault(f"{what}: {name}: {error}", _raised_at(error) or declared_at)
            continue
        at = locate(named)
        if not at.startswith(os.path.dirname(declared_at)):
            at = declared_at  # what is wrong is that it was named
        if name == field:
            for said in find_protocol_faults(named, protocols_of(record)):
                yield Fault(f"{what}: {name} {reference!r} {said}", at)
        elif not callable(named):
            yield Fault(f"{what}: {name} {reference!r} is {named!r}, which cannot be called", declared_at)
        elif name == "options" and isinstance(record, Backend):
            for said in _unlike_options(named, record):
                yield Fault(f"{what}: {name} {reference!r} {said}", at)
        elif not _can_be_given(named, GIVEN.get(type(record), 0)):
            yield Fault(f"{what}: {name} {reference!r} takes {inspect.signature(named)}, and is given one argument", at)


def protocols_of(record: Record) -> list[type]:
    """What the class that a record names must do: by its kind, and by each of its capabilities."""
    wanted = [PROTOCOLS[type(record)][1]] if type(record) in PROTOCOLS else []
    if isinstance(record, TrainBackend):
        wanted += [OFFERED[one] for one in sorted(record.capabilities) if one in OFFERED]
    return wanted


def find_protocol_faults(named: Any, protocols: Iterable[type]) -> Iterator[str]:
    """What a class lacks of what it is to do, in words that go on from its name."""
    if not isinstance(named, type):
        yield f"is {getattr(named, '__qualname__', repr(named))}, a {type(named).__name__}, and no class"
        return
    promised = {protocol: capability for capability, protocol in OFFERED.items()}
    for protocol in protocols:
        if missing := find_missing_methods(named, protocol):
            by = f", which its capability {promised[protocol]!r} promises" if protocol in promised else ""
            yield f"is no {protocol.__name__}: it lacks {', '.join(missing)}{by}"
        for said in find_mismatched_methods(named, protocol):
            yield f"is no {protocol.__name__}: {said}"


def _unlike_options(named: Any, record: Backend) -> Iterator[str]:
    """Yield what is wrong with a class of options."""
    from enginehouse.engines.options import RolloutOptions, TrainOptions

    base = TrainOptions if isinstance(record, TrainBackend) else RolloutOptions
    if not (isinstance(named, type) and issubclass(named, base)):
        yield f"is not derived from {base.__module__}:{base.__name__}"
    elif LORA in record.capabilities and "lora" not in named.model_fields:
        yield f"has no option 'lora', which the capability {LORA!r} promises"


def _can_be_given(function: Any, positional: int) -> bool:
    try:
        inspect.signature(function).bind_partial(*[None] * positional)
    except TypeError:
        return False
    except ValueError:  # written in C: only a call can tell
        return True
    return True


def locate(named: Any) -> str:
    """Return file and line of what was imported; empty where they are not known."""
    code = getattr(inspect.unwrap(named), "__code__", None) if callable(named) else None
    if isinstance(code, CodeType):
        return f"{code.co_filename}:{code.co_firstlineno}"
    try:
        return f"{inspect.getsourcefile(named)}:{inspect.getsourcelines(named)[1]}"
    except (TypeError, OSError):
        return ""


def _raised_at(error: ResolveError) -> str:
    """Where importing a module failed; empty where it did not begin."""
    cause = error.__cause__
    if isinstance(cause, SyntaxError):
        return f"{cause.filename}:{cause.lineno}"
    frames = traceback.extract_tb(cause.__traceback__) if cause else []
    own = [one for one in frames if "importlib" not in one.filename and one.filename != resolve.__code__.co_filename]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else ""
