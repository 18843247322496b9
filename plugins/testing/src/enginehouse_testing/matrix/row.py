"""A row of the matrix: what a run of one combination found, read from its run directory."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from enginehouse_rl.runs.jsonlines import read_whole_lines
from enginehouse_testing.matrix.combination import Combination, Planned, Setting
from enginehouse_testing.matrix.task import PROMPTS_A_STEP, SAMPLES_A_PROMPT

Outcome = Literal["ran", "failed", "refused"]

TOLERANCE = 1e-4
"""Largest mean absolute difference, in nats, of two engines that compute in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a run's own metrics say.

    Attributes:
        mean_difference: mean over all steps of the mean absolute difference of logprobs, rollout against trainer, nats.
        max_difference: the largest difference of any token, nats.
        update_seconds: median time of a weight update, from the actor to verified replicas.
        tokens_per_second: median of the tokens the rollout drew in a step over the seconds it took.
        update_mib: size of the weights.
        steps: of the run. Medians leave out the first step, if there is another.
    """

    mean_difference: float
    max_difference: float
    update_seconds: float
    tokens_per_second: float
    update_mib: float
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One combination.

    Attributes:
        train: the training backend.
        rollout: the rollout backend.
        transport: the weight transport.
        outcome: `"ran"`, `"failed"`, or `"refused"` by the plan.
        reason: why it did not run, or what went wrong; empty where nothing did.
        figures: of a run that ended, also where they are worse than they may be.
        setting: steps and most processes it was made with.
        layouts: of actor and rollout, in words.
        placement: `"colocated"` or `"separate"`.
        standing: versions it was found with, by kind.
        overrides: what made the shared config this run's.
        busy_cores: cores that others kept busy before it began.
        begun: when, ISO 8601 in UTC.
        seconds: how long it took, starting and ending of processes included.
    """

    train: str
    rollout: str
    transport: str
    outcome: Outcome
    reason: str = ""
    figures: Figures | None = None
    setting: Mapping[str, int] = field(default_factory=dict)
    layouts: Mapping[str, str] = field(default_factory=dict)
    placement: str = ""
    standing: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    overrides: Sequence[str] = ()
    busy_cores: float | None = None
    begun: str = ""
    seconds: float | None = None

    @property
    def combination(self) -> Combination:
        """What was combined."""
        return Combination(self.train, self.rollout, self.transport)

    def as_json(self) -> dict[str, Any]:
        """Plain data, strict JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Row:
        """The row that `as_json` wrote."""
        figures = content.get("figures")
        return cls(**{**content, "figures": None if figures is None else Figures(**figures)})

    def still_stands(self, setting: Setting, standing: Mapping[str, Mapping[str, str]]) -> bool:
        """Whether it ran, in the same way and with the versions that are there now."""
        return self.outcome == "ran" and self.setting == asdict(setting) and self.standing == standing


def refused(combination: Combination, setting: Setting, reason: str) -> Row:
    """The row of a combination that the plan does not allow."""
    return Row(**asdict(combination), outcome="refused", reason=reason, setting=asdict(setting))


def ran(combination: Combination, setting: Setting, planned: Planned, directory: Path, **facts: Any) -> Row:
    """The row of a run that ended well by its exit code.

    Args:
        directory: the run's.
        facts: further fields of the row.
    """
    found = figures(read_whole_lines(directory / "metrics.jsonl"))
    wrong = "the run's metrics lack a figure, or it is not finite" if found is None else ""
    if found is not None and not found.mean_difference <= TOLERANCE:
        wrong = f"the engines' logprobs are {found.mean_difference:.2g} nats apart on average, more than {TOLERANCE:g}"
    return Row(
        **asdict(combination),
        outcome="failed" if wrong else "ran",
        reason=wrong,
        figures=found,
        setting=asdict(setting),
        **described(planned),
        **facts,
    )


def failed(combination: Combination, setting: Setting, planned: Planned, reason: str, **facts: Any) -> Row:
    """The row of a run that failed."""
    return Row(
        **asdict(combination), outcome="failed", reason=reason, setting=asdict(setting), **described(planned), **facts
    )


def described(planned: Planned) -> dict[str, Any]:
    """Fields of a row that follow from its plan."""
    config = planned.plan.config
    layouts = {"actor": str(planned.train), "rollout": f"{planned.rollout.name} x{config.rollout.replicas}"}
    placement = "colocated" if planned.plan.roles["rollout"].shares else "separate"
    return {"layouts": layouts, "placement": placement, "overrides": planned.overrides}


def figures(metrics: Sequence[Mapping[str, Any]]) -> Figures | None:
    """The figures of a run from the lines of its `metrics.jsonl`; None where one is missing or not finite."""
    warm = metrics[1:] or metrics
    try:
        found = Figures(
            mean_difference=statistics.fmean(_all(metrics, "mismatch/absolute_mean")),
            max_difference=max(_all(metrics, "mismatch/absolute_max")),
            update_seconds=statistics.median(_all(warm, "time/sync")),
            tokens_per_second=statistics.median(
                tokens * PROMPTS_A_STEP * SAMPLES_A_PROMPT / seconds
                for tokens, seconds in zip(_all(warm, "response/tokens_mean"), _all(warm, "time/generate"), strict=True)
            ),
            update_mib=metrics[-1]["weights/mib"],
            steps=len(metrics),
        )
    except (IndexError, KeyError, TypeError, ValueError, ZeroDivisionError):  # a null stands for what is not finite
        return None
    return found if all(map(math.isfinite, asdict(found).values())) else None


def _all(metrics: Iterable[Mapping[str, Any]], name: str) -> list[float]:
    return [float(line[name]) for line in metrics]


def error_of(directory: Path, log: Path, since: float = 0.0) -> str:
    """What a failed run said: the error in its record, else the end of its log.

    Args:
        since: when the run began, seconds since the epoch; an older record is another run's.
    """
    record = directory / "run.json"
    if record.exists() and record.stat().st_mtime >= since:
        content = json.loads(record.read_text(encoding="utf-8"))
        if content.get("error"):
            return str(content["error"])
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [number for number, line in enumerate(lines) if line.startswith("Error:")]
    return "\n".join(lines[errors[-1] :] if errors else lines[-3:]) or "it said nothing"
