"""A row of the matrix: the result of a run of one combination, read from its run directory."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from enginehouse_rl.runs.jsonlines import read_whole_lines
from enginehouse_testing.matrix.combination import Combination, Planned, Setting
from enginehouse_testing.matrix.task import PROMPTS_A_STEP, SAMPLES_A_PROMPT
from enginehouse_testing.model_under_test import mean_difference

Outcome = Literal["ran", "failed", "refused"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Figures from a run's own metrics. Medians leave out the first step if there are several.

    Attributes:
        mean_difference: mean absolute difference between the logprobs of rollout and trainer, in nats, averaged over
            all steps.
        max_difference: the largest such difference of any token, in nats.
        update_seconds: median time of a weight update, from the start at the actor to verified replicas.
        tokens_per_second: number of tokens that the rollout generated in a step, divided by the seconds that it took;
            median over the steps.
        update_mib: size of the weights.
        kl: k3 estimate of the trainer's divergence from the rollout, in nats, averaged over all steps; None: unknown.
    """

    mean_difference: float
    max_difference: float
    update_seconds: float
    tokens_per_second: float
    update_mib: float
    steps: int
    kl: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixRow:
    """One combination.

    Attributes:
        model: label of the model; empty: the tiny model in float32.
        outcome: `"ran"`, `"failed"`, or `"refused"` by the plan.
        reason: the reason why it failed or did not run; else empty.
        figures: figures of a run that ended, even if they exceed the tolerance.
        setting: number of steps and maximum number of processes of the run.
        layouts: descriptions of the layouts of actor and rollout.
        placement: `"colocated"` or `"separate"`.
        standing: versions that the run depended on, by the kind of the part: what `matrix.standing.standing` returns.
        overrides: changes to the shared config for this run.
        busy_cores: number of cores that other programs kept busy before the run began.
        begun: time when the run began, ISO 8601 in UTC.
        seconds: duration of the run, with the start and end of its processes.
    """

    train: str
    rollout: str
    transport: str
    model: str = ""
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
        """The combination of the row."""
        return Combination(self.train, self.rollout, self.transport, self.model)

    def as_json(self) -> dict[str, Any]:
        """Return plain data, strict JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> MatrixRow:
        """Read what `as_json` returned."""
        figures = content.get("figures")
        return cls(**{**content, "figures": None if figures is None else Figures(**figures)})

    def still_stands(self, setting: Setting, standing: Mapping[str, Mapping[str, str]]) -> bool:
        """Return True if the combination ran with this setting and these versions."""
        return self.outcome == "ran" and self.setting == asdict(setting) and self.standing == standing


def refused(combination: Combination, setting: Setting, reason: str) -> MatrixRow:
    """Return the row of a combination that the plan does not allow."""
    return MatrixRow(**asdict(combination), outcome="refused", reason=reason, setting=asdict(setting))


def ran(combination: Combination, setting: Setting, planned: Planned, directory: Path, **facts: Any) -> MatrixRow:
    """Return the row of a run that ended with exit code 0; `facts` are additional fields of the row."""
    read = figures(read_whole_lines(directory / "metrics.jsonl"))
    reason = "the run's metrics lack a figure, or it is not finite" if read is None else ""
    most = mean_difference(planned.plan.roles["rollout"])
    if read is not None and not read.mean_difference <= most:
        reason = f"the engines' logprobs are {read.mean_difference:.2g} nats apart on average, more than {most:g}"
    row = failed(combination, setting, planned, reason, figures=read, **facts)
    return row if reason else replace(row, outcome="ran")


def failed(combination: Combination, setting: Setting, planned: Planned, reason: str, **facts: Any) -> MatrixRow:
    """Return the row of a run that failed."""
    replicas = planned.plan.config.rollout.replicas
    return MatrixRow(
        **asdict(combination),
        outcome="failed",
        reason=reason,
        setting=asdict(setting),
        layouts={"actor": str(planned.train), "rollout": f"{planned.rollout.name} x{replicas}"},
        placement="colocated" if planned.plan.roles["rollout"].shares else "separate",
        overrides=planned.overrides,
        **facts,
    )


def figures(metrics: Sequence[Mapping[str, Any]]) -> Figures | None:
    """Return the figures of a run from the lines of its `metrics.jsonl`; None if one is missing or not finite."""
    warm = metrics[1:] or metrics
    try:
        read = Figures(
            mean_difference=statistics.fmean(_column(metrics, "mismatch/absolute_mean")),
            max_difference=max(_column(metrics, "mismatch/absolute_max")),
            update_seconds=statistics.median(_column(warm, "time/sync")),
            tokens_per_second=statistics.median(
                tokens * PROMPTS_A_STEP * SAMPLES_A_PROMPT / seconds
                for tokens, seconds in zip(
                    _column(warm, "response/tokens_mean"), _column(warm, "time/generate"), strict=True
                )
            ),
            update_mib=metrics[-1]["weights/mib"],
            steps=len(metrics),
            kl=statistics.fmean(_column(metrics, "mismatch/kl")),
        )
    except (IndexError, KeyError, TypeError, ValueError, ZeroDivisionError):  # null: a number that is not finite
        return None
    return read if all(map(math.isfinite, asdict(read).values())) else None


def _column(metrics: Iterable[Mapping[str, Any]], name: str) -> list[float]:
    return [float(line[name]) for line in metrics]


def error_of(directory: Path, log: Path, since: float = 0.0) -> str:
    """Return the error in a failed run's record, else the end of its log.

    Args:
        since: time when the run began, in seconds since the epoch; an older record belongs to another run.
    """
    record = directory / "run.json"
    if record.exists() and record.stat().st_mtime >= since:
        content = json.loads(record.read_text(encoding="utf-8"))
        if content.get("error"):
            return str(content["error"])
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [number for number, line in enumerate(lines) if line.startswith("Error:")]
    return "\n".join(lines[errors[-1] :] if errors else lines[-3:]) or "it printed nothing"
