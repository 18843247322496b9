"""Where a run's steps spend their time, who is waited for, and which key of the config would change it.

Every second is put down to one thing by `waited_for`, as the alarm `controller_bound` does.
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
from enginehouse_rl.runs.waits import WORDS, number, waited_for

SKIPPED = 2
"""The first steps of a process load, compile and fill caches."""
FEWEST = 5
"""Of fewer other steps nothing is said."""
WORTH = 0.35
"""Share of the time below which nothing stands out, and no key would do much."""
OVERLAPS = 0.15
"""Share of the time that has to lie beside generation for `train.staleness` to gain by it."""
IDLE = 0.3
"""Share of generation in which an average replica is idle that others still answer in."""

NEED_PROCESSES = (
    *("actor.processes", "critic.processes", "reference.processes", "reward_model.processes"),
    *("rollout.replicas", "train.staleness"),
)
"""Keys that the inline launcher, which runs one process, does nothing with."""


@dataclass(frozen=True)
class Advice:
    """A key that would change where the time goes.

    Attributes:
        key: of the config.
        now: its value in this run.
        attempt: what to try.
        why: what it does.
    """

    key: str
    now: Any
    attempt: Any
    why: str


@dataclass(frozen=True)
class Bottleneck:
    """What is said of a run.

    Attributes:
        steps: how many steps it is made of.
        step_seconds: of one, the median, with what lies between it and the next.
        shares: of the time, by what is waited for, the largest first.
        phases: median seconds of each.
        advice: the likeliest first.
        said: all of it in a paragraph.
    """

    steps: int
    step_seconds: float = 0.0
    shares: Mapping[str, float] = field(default_factory=dict)
    phases: Mapping[str, float] = field(default_factory=dict)
    advice: Sequence[Advice] = ()
    said: str = ""


def bottleneck_of(path: Path) -> Bottleneck:
    """What a run directory says.

    Raises:
        UserError: it is none.
    """
    run = read_run(path)
    rows = [row for row in run.metrics.rows if number(row, "time/step")]
    config, _ = run.config()
    profiled = json.loads(config.get("train.profile_steps") or "[]")
    counted = [row for row in rows[SKIPPED:] if row["step"] not in profiled]
    if len(counted) < FEWEST:
        return Bottleneck(len(counted), said=_too_few(len(rows), len(counted)))
    scored = bool(config.get("reward.function")) or any(key.startswith("reward.functions.") for key in config)
    seconds = [waited_for(row, scored=scored) for row in counted]
    parts = {name: statistics.median(one.get(name, 0.0) for one in seconds) for name in WORDS}
    for name, value in _between(rows[SKIPPED:], path / "timeline.json").items():
        parts[name] += value
    whole = sum(parts.values())
    shares = {name: part / whole for name, part in sorted(parts.items(), key=lambda one: -one[1]) if part > 0}
    names = dict.fromkeys(name for row in counted for name in row if name.startswith("time/") and name != "time/step")
    phases = {name.removeprefix("time/"): _median(counted, name) for name in names}
    advice = [one for one in _advice(shares, counted, config, read_record(path)) if one.key in config]
    if config.get("cluster.launcher") == "inline" and any(one.key in NEED_PROCESSES for one in advice):
        others = [one for one in advice if one.key not in NEED_PROCESSES]
        advice = [Advice("cluster.launcher", "inline", "ray", "roles then have processes, and several"), *others]
    said = _in_words(len(counted), whole, shares, phases, advice, (path / "profiles").is_dir())
    return Bottleneck(len(counted), whole, shares, phases, advice, said)


def _between(rows: Sequence[Mapping[str, Any]], timeline: Path) -> dict[str, float]:
    """Seconds between two steps, the mean."""
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


def _advice(
    shares: Mapping[str, float], rows: Sequence[Mapping[str, Any]], config: Mapping[str, Any], record: Mapping[str, Any]
) -> list[Advice]:
    """What to try for the largest share, if it is worth it."""
    who = next(iter(shares))
    if shares[who] < WORTH:
        return []
    roles: Mapping[str, Any] = record.get("roles") or {}
    places = {role: [(one.get("node"), one.get("pid")) for one in ranks] for role, ranks in roles.items()}
    apart = not set(places.get("rollout", ())) & set(places.get("actor", ()))

    def more(key: str, why: str, least: int = 1) -> Advice:
        now = config.get(key)
        return Advice(key, now, 2 * now if isinstance(now, int) and now else least, why)

    beside = sum(share for name, share in shares.items() if name in ("actor", "critic", "reference", "reward_model"))
    overlap = []
    if config.get("train.staleness") == 0 and min(beside, sum(shares.get(name, 0.0) for name in GENERATES)) > OVERLAPS:
        own = "" if apart else ", by processes of the rollout's own (rollout.placement=separate, which auto becomes)"
        why = f"the next step's responses are drawn while this one trains{own}"
        overlap = [Advice("train.staleness", 0, 1, why)]
    if who == "rollout":
        found = overlap
        if len(places.get("rollout", ())) > 1 and _median(rows, "rollout/utilisation") < 1 - IDLE:
            why = "replicas wait for the longest answers: a step then takes the prompts that are answered first"
            found = [more("rollout.extra_groups", why, 4), *found]
        return [*found, more("rollout.replicas" if apart else "actor.processes", "more replicas answer at once")]
    if who == "actor":
        epochs = config.get("algorithm.epochs")
        fewer = [Advice("algorithm.epochs", epochs, 1, "each is a pass over the samples")] if (epochs or 1) > 1 else []
        return [more("actor.processes", "more share each batch"), *overlap, *fewer]
    nodes = {node for ranks in places.values() for node, _ in ranks}
    moved = (
        Advice("rollout.placement", config.get("rollout.placement"), "colocated", "weights then stay in their process")
        if len(nodes) <= 1 and apart and not config.get("train.staleness")
        else Advice(
            "weights.transport", config.get("weights.transport"), "point_to_point", "each rank sends its own parts"
        )
    )
    rewarding = [more("reward.processes", "more responses are scored at once")]
    if config.get("reward_model.path"):
        rewarding.append(more("reward_model.processes", "the reward model is part of it", 2))
    if "train.staleness" in config and config.get("train.staleness") == 0:
        why = "the next step's are scored while this one trains; it takes a rollout in processes of its own"
        rewarding += overlap or [Advice("train.staleness", 0, 1, why)]
    return {
        "reward": rewarding,
        "environment": [more("environment.processes", "more episodes are in tools at once", 2), *overlap],
        "critic": [more("critic.processes", "more share each batch", 2), *overlap],
        "reference": [more("reference.processes", "more share each batch", 2), *overlap],
        "reward_model": [more("reward_model.processes", "more share each batch", 2), *overlap],
        "stages": overlap,
        "sync": [moved],
        "turns": [Advice("rollout.placement", config.get("rollout.placement"), "separate", "each role keeps devices")],
        "controller": [
            more("environment.processes", "tokens and texts do not pass the controller then", 2),
            more("train.prompts_per_step", "what a step costs whatever its size is spread over more samples"),
            more("train.rows_per_step", "what a step costs whatever its size is spread over more rows"),
        ],
        "validation": [
            more("train.validate_every", "validations come less often", 50),
            more("evaluation.max_prompts", "fewer prompts are answered in one", 100),
        ],
        "checkpoint": [more("train.checkpoint_every", "checkpoints come less often", 50)],
    }[who]


GENERATES = ("rollout", "reward", "environment")
"""What a step waits for before it trains."""


def _in_words(
    steps: int,
    whole: float,
    shares: Mapping[str, float],
    phases: Mapping[str, float],
    advice: Sequence[Advice],
    profiled: bool,
) -> str:
    who, share = next(iter(shares.items()))
    others = ", ".join(f"{WORDS[name]} {part:.0%}" for name, part in list(shares.items())[1:] if part >= 0.005)
    longest = sorted(phases.items(), key=lambda phase: -phase[1])[:4]
    said = (
        f"A step takes {whole:.3g} s (the median of {steps}), and {share:.0%} of that it waits for {WORDS[who]}"
        f"{f'; for {others}' if others else ''}. Its longest phases are "
        f"{', '.join(f'{name} {seconds:.3g} s' for name, seconds in longest)}."
    )
    if share < WORTH:
        said += " No part stands out, so no single key would change much."
    elif not advice:
        said += " No key of the config is known to change that."
    for place, one in enumerate(advice):
        now = "unset" if one.now is None else one.now
        said += f" {'Or' if place else 'Try'} {one.key}={one.attempt} (now {now}): {one.why}."
    if profiled and who in ("actor", "critic", "reference", "reward_model", "rollout"):
        said += " profiles/ has which operators it is made of."
    return said


def _too_few(steps: int, counted: int) -> str:
    return (
        f"The run has {steps} step{'' if steps == 1 else 's'}, {counted} of them after the first {SKIPPED} and without "
        f"a profile: at least {FEWEST} are needed to say where the time goes."
    )


def _median(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    return statistics.median(number(row, name) for row in rows)
