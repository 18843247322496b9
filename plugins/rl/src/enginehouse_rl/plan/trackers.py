"""The trackers of a run, as a plan has them; `enginehouse_rl.plan.parts.directory` checks them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


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
