"""Checks of records. A mistake is reported at the declaration, as a problem of the declaring plugin."""

from __future__ import annotations

import re

from enginehouse.errors import first_line, nearest
from enginehouse.plugin import capabilities, records
from enginehouse.plugin.errors import PluginError
from enginehouse.plugin.requirements import parse_requirement

DECLARING: dict[str, tuple[type[records.Record], ...]] = {
    "enginehouse_register_backends": (records.TrainBackend, records.RolloutBackend),
    "enginehouse_register_transports": (records.Transport,),
    "enginehouse_register_dispatch_modes": (records.DispatchMode,),
    "enginehouse_register_advantages": (records.Advantage,),
    "enginehouse_register_losses": (records.Loss,),
    "enginehouse_register_rewards": (records.Reward,),
    "enginehouse_register_filters": (records.Filter,),
    "enginehouse_register_trackers": (records.Tracker,),
    "enginehouse_register_environments": (records.Environment,),
    "enginehouse_register_stages": (records.Stage,),
}
"""Record types that each declaring hook accepts."""

# A name has no colon, because configs also accept "distribution:name" and "module:function".
NAME = re.compile(r"[a-z][a-z0-9_.-]*\Z")
REFERENCE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*\Z")


def check_record(record: object, hook: str) -> records.Record:
    """Return `record` if `hook` takes it and its fields are valid. Raises `PluginError` if it has the wrong type, or an
    invalid name, reference, requirement or capability."""
    accepted = DECLARING[hook]
    if not isinstance(record, accepted):
        names = " or ".join(kind.__name__ for kind in accepted)
        raise PluginError(f"{hook} takes {names}, not {record!r}")
    what = f"{record.kind} {record.name!r}"
    if not NAME.match(record.name):
        raise PluginError(
            f"{what}: the name must consist of lower-case letters, digits, '-', '_' and '.', and begin with a letter"
        )
    for field_name in record.references:
        reference = getattr(record, field_name)
        if not (isinstance(reference, str) and REFERENCE.match(reference)):
            raise PluginError(f"{what}: {field_name} must be of the form 'module:attribute', not {reference!r}")
    if isinstance(record, records.Backend | records.Tracker | records.Function):
        _check_requirements(what, record)
    for capability in getattr(record, "capabilities", ()):
        if capability not in capabilities.BY_KIND[record.kind]:
            choices = nearest(str(capability), capabilities.BY_KIND[record.kind])
            raise PluginError(f"{what}: unknown capability {capability!r}. {choices}")
    return record


def _check_requirements(what: str, record: records.Backend | records.Tracker | records.Function) -> None:
    """Reject an invalid requirement string, which would make later checks fail."""
    for text in record.requires:
        try:
            parse_requirement(text)
        except (ValueError, AttributeError, TypeError) as error:
            why = first_line(error)
            raise PluginError(f"{what}: requires contains {text!r}, which is not a valid requirement: {why}") from error
