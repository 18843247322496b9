"""Finds where a run's steps spend their time, and which key of the config would change that.

`split_waits` attributes each second to one part, as it does for the alarm `controller_bound`.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from enginehouse_report.run_files import read_run
from enginehouse_rl.config.earlier_run import read_record
from enginehouse_rl.runs.timeline import read_events
from enginehouse_rl.runs.waits import WORDS, read_number, split_waits

SKIPPED = 2
"""Number of first steps that are skipped, because they load, compile and fill caches."""
FEWEST = 5
"""Minimum number of remaining steps for an analysis."""
WORTH = 0.35
"""If the largest part is below this fraction of the time, no key would change much."""
OVERLAPS = 0.15
"""`train.staleness` helps if both training and generation take more than this fraction of the time."""
IDLE = 0.3
"""Additional groups help if the average replica is idle for more than this fraction of the generation."""

NEED_PROCESSES = (
    *("actor.processes", "critic.processes", "reference.processes", "reward_model.processes"),
    *("rollout.replicas", "train.staleness"),
)
"""Keys that have no effect under the inline launcher, which runs a single process."""
GENERATES = ("rollout", "reward", "environment")
"""Parts of a step that produce its samples."""


@dataclass(frozen=True)
class Advice:
    """A key of the config, and a value that would reduce the largest part of the time."""

    key: str
    now: Any  # value in this run
    attempt: Any  # value to try
    why: str


@dataclass(frozen=True)
class Bottleneck:
    steps: int  # number of steps that count
    step_seconds: float = 0.0  # median of a step with the time until the next
    shares: Mapping[str, float] = field(default_factory=dict)  # fractions of the time by part, the largest first
    phases: Mapping[str, float] = field(default_factory=dict)  # median seconds
    advice: Sequence[Advice] = ()  # the most promising first
    said: str = ""  # the analysis as a paragraph


def find_bottleneck(path: Path) -> Bottleneck:
    """Find what takes the most time in the steps of a run, and which config keys would change that.

    Raises:
        UserError: the path is no run directory.
    """
    run = read_run(path)
    rows = [row for row in run.metrics.rows if read_number(row, "time/step")]
    config, _, _ = run.config()
    profiled = json.loads(config.get("train.profile_steps") or "[]")
    counted = [row for row in rows[SKIPPED:] if row["step"] not in profiled]
    if len(counted) < FEWEST:
        return Bottleneck(len(counted), said=_too_few_text(len(rows), len(counted)))
    scored = bool(config.get("reward.function")) or any(key.startswith("reward.functions.") for key in config)
    seconds = [split_waits(row, scored=scored) for row in counted]
    parts = {name: statistics.median(waits.get(name, 0.0) for waits in seconds) for name in WORDS}
    for name, value in _seconds_between(rows[SKIPPED:], path / "timeline.json").items():
        parts[name] += value
    whole = sum(parts.values())
    shares = {name: part / whole for name, part in sorted(parts.items(), key=lambda item: -item[1]) if part > 0}
    names = dict.fromkeys(name for row in counted for name in row if name.startswith("time/") and name != "time/step")
    phases = {name.removeprefix("time/"): _median(counted, name) for name in names}
    advisor = _Advisor(shares, counted, config, read_record(path))
    advice = [item for item in advisor.advise() if item.key in config]
    if config.get("cluster.launcher") == "inline" and any(item.key in NEED_PROCESSES for item in advice):
        others = [item for item in advice if item.key not in NEED_PROCESSES]
        advice = [Advice("cluster.launcher", "inline", "ray", "each role then has one or more processes"), *others]
    paragraph = _describe(len(counted), whole, shares, phases, advice, (path / "profiles").is_dir())
    return Bottleneck(len(counted), whole, shares, phases, advice, paragraph)


def _seconds_between(rows: Sequence[Mapping[str, Any]], timeline: Path) -> dict[str, float]:
    """Return the mean number of seconds between two steps: for validations, for checkpoints, and for the controller."""
    gaps = [
        max(after["elapsed_seconds"] - before["elapsed_seconds"] - after["time/step"], 0.0)
        for before, after in pairwise(rows)
        if after["step"] == before["step"] + 1
    ]
    if not gaps:
        return {}
    events = read_events(timeline) if timeline.is_file() else []
    spans = [event for event in events if event["ph"] == "X" and event.get("pid") == 1]
    ends = {event["name"]: event["ts"] for event in spans if event["name"].startswith("step ")}
    first, last = (ends.get(f"step {row['step']}", 0.0) for row in (rows[0], rows[-1]))
    left, spent = statistics.fmean(gaps), {}
    for name, phase in (("validation", "validate"), ("checkpoint", "checkpoint")):
        drawn = sum(event["dur"] for event in spans if event["name"] == phase and first < event["ts"] < last)
        spent[name] = min(drawn / 1e6 / len(gaps), left)
        left -= spent[name]
    return spent | {"controller": left}


class _Advisor:
    """Finds the keys that would reduce the largest part of a step's time."""

    def __init__(
        self,
        shares: Mapping[str, float],
        rows: Sequence[Mapping[str, Any]],
        config: Mapping[str, Any],
        record: Mapping[str, Any],
    ):
        self._shares, self._rows, self._config = shares, rows, config
        roles: Mapping[str, Any] = record.get("roles") or {}
        self._places = {role: [(rank.get("node"), rank.get("pid")) for rank in ranks] for role, ranks in roles.items()}
        self._apart = not set(self._places.get("rollout", ())) & set(self._places.get("actor", ()))

    def advise(self) -> list[Advice]:
        """Return advice, the most promising first. Return none if no part is large enough."""
        part = next(iter(self._shares))
        if self._shares[part] < WORTH:
            return []
        more, overlap = self._more, self._overlap()
        return {
            "rollout": self._advise_rollout(),
            "actor": self._advise_actor(),
            "reward": self._advise_reward(),
            "environment": [more("environment.processes", "more episodes use tools at the same time", 2), *overlap],
            "critic": [more("critic.processes", "more processes share each batch", 2), *overlap],
            "reference": [more("reference.processes", "more processes share each batch", 2), *overlap],
            "reward_model": [more("reward_model.processes", "more processes share each batch", 2), *overlap],
            "stages": overlap,
            "sync": self._advise_sync(),
            "turns": [self._try("rollout.placement", "separate", "each role then keeps its devices")],
            "controller": [
                more("environment.processes", "tokens and texts then do not pass through the controller", 2),
                more("train.prompts_per_step", "the fixed cost of a step is spread over more samples"),
                more("train.rows_per_step", "the fixed cost of a step is spread over more rows"),
            ],
            "validation": [
                more("train.validate_every", "validations come less often", 50),
                more("evaluation.max_prompts", "a validation answers fewer prompts", 100),
            ],
            "checkpoint": [more("train.checkpoint_every", "checkpoints come less often", 50)],
        }[part]

    def _try(self, key: str, attempt: Any, why: str) -> Advice:
        return Advice(key, self._config.get(key), attempt, why)

    def _more(self, key: str, why: str, least: int = 1) -> Advice:
        """Advise to double the value of a key, or to set it to `least`."""
        now = self._config.get(key)
        return self._try(key, 2 * now if isinstance(now, int) and now else least, why)

    def _overlap(self) -> list[Advice]:
        """Advise to generate during training if both take long enough."""
        training = sum(self._shares.get(name, 0.0) for name in ("actor", "critic", "reference", "reward_model"))
        generation = sum(self._shares.get(name, 0.0) for name in GENERATES)
        if self._config.get("train.staleness") != 0 or min(training, generation) <= OVERLAPS:
            return []
        own = ", in separate processes (rollout.placement=auto becomes separate)"
        why = f"the next step's responses are drawn while this one trains{'' if self._apart else own}"
        return [self._try("train.staleness", 1, why)]

    def _advise_rollout(self) -> list[Advice]:
        advice = self._overlap()
        if len(self._places.get("rollout", ())) > 1 and _median(self._rows, "rollout/utilisation") < 1 - IDLE:
            why = "replicas wait for the longest answers: a step then takes the prompts that are answered first"
            advice = [self._more("rollout.extra_groups", why, 4), *advice]
        key = "rollout.replicas" if self._apart else "actor.processes"
        return [*advice, self._more(key, "more replicas answer at once")]

    def _advise_actor(self) -> list[Advice]:
        epochs = self._try("algorithm.epochs", 1, "each epoch is another pass over the samples")
        fewer = [epochs] if (epochs.now or 1) > 1 else []
        return [self._more("actor.processes", "more processes share each batch"), *self._overlap(), *fewer]

    def _advise_reward(self) -> list[Advice]:
        advice = [self._more("reward.processes", "more responses are scored at once")]
        if self._config.get("reward_model.path"):
            advice.append(self._more("reward_model.processes", "the reward model takes a part of this time", 2))
        if self._config.get("train.staleness") == 0:
            why = (
                "the next step's responses are scored while this step trains; this needs a rollout in separate "
                "processes"
            )
            advice += self._overlap() or [self._try("train.staleness", 1, why)]
        return advice

    def _advise_sync(self) -> list[Advice]:
        nodes = {node for ranks in self._places.values() for node, _ in ranks}
        if len(nodes) <= 1 and self._apart and not self._config.get("train.staleness"):
            return [self._try("rollout.placement", "colocated", "weights then stay in their process")]
        return [self._try("weights.transport", "point_to_point", "each rank then sends only its own parts")]


def _describe(
    steps: int,
    whole: float,
    shares: Mapping[str, float],
    phases: Mapping[str, float],
    advice: Sequence[Advice],
    profiled: bool,
) -> str:
    largest, share = next(iter(shares.items()))
    others = ", ".join(f"{WORDS[name]} {part:.0%}" for name, part in list(shares.items())[1:] if part >= 0.005)
    longest = sorted(phases.items(), key=lambda phase: -phase[1])[:4]
    text = (
        f"A step takes {whole:.3g} s (the median of {steps}), and {share:.0%} of that it waits for {WORDS[largest]}"
        f"{f'; for {others}' if others else ''}. Its longest phases are "
        f"{', '.join(f'{name} {seconds:.3g} s' for name, seconds in longest)}."
    )
    if share < WORTH:
        text += " No part stands out, so no single key would change much."
    elif not advice:
        text += " No key of the config is known to change that."
    for place, item in enumerate(advice):
        now = "unset" if item.now is None else item.now
        text += f" {'Or' if place else 'Try'} {item.key}={item.attempt} (now {now}): {item.why}."
    if profiled and largest in ("actor", "critic", "reference", "reward_model", "rollout"):
        text += " profiles/ shows its operators."
    return text


def _too_few_text(steps: int, counted: int) -> str:
    return (
        f"The run has {steps} step{'' if steps == 1 else 's'}, {counted} of them after the first {SKIPPED} and without "
        f"a profile: at least {FEWEST} are needed to say where the time goes."
    )


def _median(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    return statistics.median(read_number(row, name) for row in rows)
