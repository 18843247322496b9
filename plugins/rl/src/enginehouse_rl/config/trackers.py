"""The trackers of a run, checked: that each is there, is one, and takes its arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from enginehouse.engines import tracker as protocol
from enginehouse.engines.declared import unlike
from enginehouse.errors import ConfigError
from enginehouse.plugin import Tracker
from enginehouse.plugin.secrets import check_secrets
from enginehouse_rl.config.arguments import check_call, take_values
from enginehouse_rl.config.functions import find_function

if TYPE_CHECKING:
    from enginehouse.plugin import PluginManager
    from enginehouse.plugin.findings import Findings
    from enginehouse_rl.config import schema


@dataclass(frozen=True)
class TrackerPlan:
    """One of a run's trackers.

    Attributes:
        name: what the config calls it.
        tracker: `"module:Class"`.
        arguments: as the class takes them, but for `"${NAME}"`, which stays as it is written until it is constructed.
        packages: requirement strings of what it needs, for the record of versions.
    """

    name: str
    tracker: str
    arguments: Mapping[str, Any]
    packages: tuple[str, ...] = ()


def check_trackers(
    findings: Findings, plugins: PluginManager, trackers: Sequence[schema.Tracker], python_path: Sequence[str]
) -> tuple[TrackerPlan, ...]:
    """Check the section `run.trackers`; those that will not do are among the findings and are left out."""
    found = []
    for number, given in enumerate(trackers):
        key = f"run.trackers[{number}]"
        check_secrets(findings, f"{key}.arguments", given.arguments)
        if given.name in [other.name for other in trackers[:number]]:
            findings.refuse(
                f"{key}.name: {given.name!r} is there twice, and what a tracker keeps in the run directory is by its "
                "name: leave one out"
            )
        with findings.collecting():
            found.append(_checked(findings, plugins, given, key, python_path))
    return tuple(found)


def _checked(
    findings: Findings, plugins: PluginManager, given: schema.Tracker, key: str, python_path: Sequence[str]
) -> TrackerPlan:
    reference, made = find_function(plugins, Tracker, given.name, f"{key}.name", python_path, always=True)
    for said in unlike(made, [protocol.Tracker]):
        raise ConfigError(f"{key}.name: {reference!r} {said} (docs/plugins/tracker.md)")
    assert made is not None
    within = f"{key}.arguments"
    check_call(made, within, given.arguments, within, values=given.arguments)
    arguments = take_values(findings, made, given.name, within, given.arguments)
    records = [one.record for one in plugins.providers(Tracker, given.name)] if plugins.is_name(given.name) else []
    packages = tuple(text for record in records if isinstance(record, Tracker) for text in record.requires)
    return TrackerPlan(given.name, reference, arguments, packages)
