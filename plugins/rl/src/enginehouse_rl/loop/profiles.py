"""Profiles chosen steps: writes a trace of each process, and its longest spans on the run's timeline."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from enginehouse.roles.placement import Roles
    from enginehouse.roles.profiles import Profile
    from enginehouse_rl.runs import RunDirectory
    from enginehouse_rl.runs.timeline import Timeline

log = logging.getLogger(__name__)

MOST_SPANS = 100_000
"""Maximum number of spans of all profiles on a run's timeline. A viewer must load them in addition to the run's spans.
"""


class Profiles:
    """Profiles the given steps, and writes their traces and spans to the run directory."""

    def __init__(self, steps: Sequence[int], run: RunDirectory):
        self._steps, self._run = steps, run

    @contextmanager
    def step(self, step: int, roles: Roles) -> Iterator[None]:
        """Profile the context if the step is chosen. A failed step gets no profile: its workers may be busy."""
        if step not in self._steps:
            yield
            return
        _call_all(roles, "profile_begin")
        yield
        directory = self._run.path / "profiles" / f"step-{step:06d}"
        shutil.rmtree(directory, ignore_errors=True)  # from a run that later resumed before this step
        processes = sum(plan.processes for plan in roles.plans.values())
        most = MOST_SPANS // (len(self._steps) * processes)
        for profile in _call_all(roles, "profile_end", str(directory), most):
            if profile.problem:
                log.warning("step %d: no profile of %s: %s", step, profile.name, profile.problem)
            else:
                _draw(self._run.timeline, step, profile)


def _call_all(roles: Roles, method: str, *args: Any) -> list[Profile]:
    """Call a method of all workers and return their results."""
    answers_by_role = [group.call(method, *args) for group in roles.groups.values()]
    answers_by_role += [fleet.call_living(method, *args) for fleet in roles.fleets.values()]
    return [answer for role_answers in answers_by_role for answer in role_answers if answer is not None]


def _draw(timeline: Timeline, step: int, profile: Profile) -> None:
    if not profile.spans:
        return
    ahead = time.time_ns() - time.monotonic_ns()  # clocks of two nodes may differ by milliseconds
    first = min(begin for _, _, begin, _ in profile.spans)
    last = max(begin + length for _, _, begin, length in profile.spans)
    details = {"trace": profile.path, "shorter_spans_left_out": profile.left_out}
    timeline.span(
        f"profile of step {step}",
        (first - ahead) / 1e9,
        (last - ahead) / 1e9,
        "profile",
        process=profile.name,
        **details,
    )
    for row, name, begin, length in sorted(profile.spans, key=lambda span: span[2]):
        timeline.span(name, (begin - ahead) / 1e9, (begin + length - ahead) / 1e9, row, process=profile.name)
