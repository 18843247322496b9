from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TrackerPlan:
    """A tracker of a run; `enginehouse_rl.plan.parts.directory` checks it.

    Attributes:
        tracker: `"module:Class"`.
        arguments: the arguments of the class. `"${NAME}"` in them is replaced only when the tracker is created.
        packages: requirement strings of the packages that it needs, for the record of versions.
    """

    name: str
    tracker: str
    arguments: Mapping[str, Any]
    packages: tuple[str, ...] = ()
