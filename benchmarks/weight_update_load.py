"""How long replicas stop for a weight update while they generate, with engines paused for the switch or for the whole.

Both sides run in turn with the same engine, whose requests are frozen during the pause. The other side's workers do not
declare `stages_while_generating`.
"""

from __future__ import annotations

import logging
import statistics
import time
from typing import Any

from benchmarks.weight_update import WORK, placed
from benchmarks.weight_update_model import write_model

logger = logging.getLogger(__name__)

SWITCH, WHOLE = "paused for the switch", "paused for the whole update"


def measure(
    parameters: int = 100_000_000,
    rounds: int = 5,
    replicas: int = 2,
    requests: int = 4,
    tokens: int = 8,
    seconds: float = 10.0,
    train: str = "torch",
    rollout: str = "vllm",
    runtime: str = "auto",
    transport: str = "shared_memory",
) -> dict[str, Any]:
    """Update the weights of replicas that generate, `rounds` times a side, after one update that does not count.

    Args:
        parameters: approximate number of the model's parameters; each is 4 bytes.
        rounds: number of measured updates of each side.
        replicas: rollout processes.
        requests: number of requests in progress on each replica.
        tokens: mean number of tokens of a response. Responses are short, because tokens are counted when they end.
        seconds: time without an update, before each update, in which tokens are counted.
        train: training backend.
        rollout: rollout backend.
        runtime: runtime of the rollout engine, as `engine.runtime` in a config.
        transport: weight transport between the two.

    Returns:
        `metrics` and `sides`. Metrics of the side that pauses for the switch: `stopped_vs_commit`, the time in which
        replicas answered nothing divided by the longest switch of a replica, median over rounds; `stopped_vs_whole`,
        the median of that time divided by the median of the other side; `tokens_while_staging`, tokens per second while
        updates were staged divided by those before the updates, of all rounds together, because few tokens are drawn
        while one is staged.
    """
    model = WORK / f"model-{parameters}"
    write_model(model, parameters)
    load = requests, tokens, seconds
    engines = train, rollout, runtime, transport
    sides = {name: _measure_side(name, str(model), engines, replicas, rounds, load) for name in (SWITCH, WHOLE)}
    ours, whole = sides[SWITCH], sides[WHOLE]
    metrics = {
        "stopped_vs_commit": statistics.median(s / c for s, c in zip(ours["stopped"], ours["commit"], strict=True)),
        "tokens_while_staging": _rate_of(ours, "staging") / _rate_of(ours, "before"),
        "stopped_vs_whole": statistics.median(ours["stopped"]) / statistics.median(whole["stopped"]),
    }
    medians = {name: {key: statistics.median(series) for key, series in side.items()} for name, side in sides.items()}
    return {"metrics": metrics, "sides": medians, "train": train, "rollout": rollout, "replicas": replicas}


def _measure_side(
    name: str,
    model: str,
    engines: tuple[str, str, str, str],
    replicas: int,
    rounds: int,
    load: tuple[int, int, float],
) -> dict[str, list[float]]:
    train, rollout, runtime, transport = engines
    requests, tokens, seconds = load
    counted = [f"{when}_{unit}" for when in ("before", "staging") for unit in ("tokens", "seconds")]
    found: dict[str, list[float]] = {series: [] for series in ("stopped", "commit", "update", *counted)}
    with placed(model, train, rollout, runtime, 1, replicas, 0, "cpu", transport) as (actor, served, sync):
        if name == WHOLE:
            served.forget_staging()
        sync.publish(1)
        served.begin_load(requests, tokens)
        for version in range(2, 3 + rounds):
            actor.change()
            begun = time.monotonic()
            time.sleep(seconds)
            sent = time.monotonic()
            report = sync.publish(version, "keep")
            staged = min(served.staged())
            ended = [end for ends in served.ended() for end in ends]
            if version == 2:
                continue
            spans = {"before": (begun, sent), "staging": (sent, staged)}
            for when, (start, end) in spans.items():
                found[f"{when}_tokens"].append(sum(drawn for at, drawn in ended if start <= at < end))
                found[f"{when}_seconds"].append(end - start)
            found["stopped"].append(report.stopped)
            found["commit"].append(max(served.commit_seconds()))
            found["update"].append(report.seconds)
            logger.info(
                "%s: stopped %.3f of %.3f s, switch %.3f s, tokens/s %.1f before, %.1f while staging so far",
                name, report.stopped, report.seconds, found["commit"][-1],
                _rate_of(found, "before"), _rate_of(found, "staging"),
            )  # fmt: skip
        served.end_load()
    return found


def _rate_of(found: dict[str, list[float]], when: str) -> float:
    """Return the tokens per second of responses that ended `"before"` or while `"staging"`, of all rounds together."""
    return sum(found[f"{when}_tokens"]) / sum(found[f"{when}_seconds"])
