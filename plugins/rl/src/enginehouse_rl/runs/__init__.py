"""A run's files and its display."""

from __future__ import annotations

from typing import TYPE_CHECKING

from enginehouse.lazy import exports

if TYPE_CHECKING:
    from enginehouse_rl.runs.clock import StepClock
    from enginehouse_rl.runs.directory import RunDirectory
    from enginehouse_rl.runs.progress import Progress
    from enginehouse_rl.runs.summary import describe_saved, summary_lines, summary_panel
    from enginehouse_rl.runs.timeline import Timeline

__all__ = ["Progress", "RunDirectory", "StepClock", "Timeline", "describe_saved", "summary_lines", "summary_panel"]

# Every command imports `plugin` of this package.
__getattr__ = exports(
    __name__,
    {
        "clock": ["StepClock"],
        "directory": ["RunDirectory"],
        "progress": ["Progress"],
        "summary": ["describe_saved", "summary_lines", "summary_panel"],
        "timeline": ["Timeline"],
    },
)
