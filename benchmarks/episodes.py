"""Thousands of episodes of many turns at once, with tools that take their time, against the same loop by hand.

Each side is a process of its own with an engine of its own; they take turns, and the one whose turn it is not is
stopped. Ours are players on the controller's event loop and a replica over Ray, as in a run; theirs is a page of
asyncio on vLLM's asynchronous engine. Greedy episodes of both must be the same, token for token.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.dispatch_side import SideProcess
from benchmarks.environments import ROOT, interpreter_of
from benchmarks.episodes_tool import longest_sleep
from benchmarks.rollout_engine import environment_of, speed, take_turns
from benchmarks.weight_update_model import describe, write_model

logger = logging.getLogger(__name__)

WORK = ROOT / "benchmarks" / "out" / "episodes"
OURS, BARE = "benchmarks.episodes_ours", "benchmarks.episodes_vllm"
START_SECONDS = 600.0
TURN_SECONDS = 1800.0
GREEDY_TASKS = 4
MB = 1e6


def measure(
    episodes: int = 2000,
    turns: int = 5,
    rounds: int = 3,
    sleep: float = 2.0,
    parameters: int = 5_000_000,
    samples: int = 8,
    max_running: int = 256,
    prompt_tokens: int = 32,
    max_tokens: int = 16,
    result_tokens: int = 8,
    runtime: str = "auto",
    device: str = "cpu",
) -> dict[str, Any]:
    """Let the two sides take turns for `rounds` rounds, after one that is not counted.

    Args:
        episodes: of a round, all begun at once.
        turns: of each; between two of them the tool is asked.
        rounds: turns of each side.
        sleep: the longest that the tool takes, seconds.
        parameters: of the model, about.
        samples: episodes of a task, which begin alike.
        max_running: completions that the engine generates at once.
        prompt_tokens: tokens of a task's prompt.
        max_tokens: tokens of each turn's answer; none ends earlier.
        result_tokens: tokens of what the tool answers.
        runtime: what the engines run under, as `engine.runtime` in a config.
        device: `"cpu"` or `"cuda"`.

    Returns:
        `metrics` and `sides`; see `figures`.

    Raises:
        ValueError: episodes that are no whole groups.
        RuntimeError: a side failed, the two do not generate the same, or not all episodes were under way at once.
    """
    if episodes % samples:
        raise ValueError(f"episodes={episodes} samples={samples}: tasks have {samples} episodes each")
    from enginehouse.plugin import plugins

    found = interpreter_of(plugins().get("rollout", "vllm", elsewhere=True), runtime, device)
    model = WORK / f"model-{parameters}"
    write_model(model, parameters)
    python = found.python or sys.executable
    task = {
        "model": str(model), "vocabulary": describe(parameters)[0].vocab_size, "device": device, "episodes": episodes,
        "turns": turns, "sleep": sleep, "samples": samples, "prompt_tokens": prompt_tokens, "max_tokens": max_tokens,
        "result_tokens": result_tokens, "max_running": max_running, "kv_cache_mib": 1024, "native": {},
        "max_model_tokens": prompt_tokens + turns * max_tokens + (turns - 1) * result_tokens,
        "python": python, "env": dict(found.env),
    }  # fmt: skip
    path = WORK / "task.json"
    path.write_text(json.dumps(task))
    here = {**os.environ, "PYTHONPATH": str(ROOT)}
    commands = {
        "bare": ([python, "-m", BARE, path], environment_of("vllm", found.env, device)),
        "enginehouse": ([sys.executable, "-m", OURS, path], here),
    }
    sides = {name: SideProcess(name, command, WORK / f"{name}.log", cwd=ROOT, env=env)
             for name, (command, env) in commands.items()}  # fmt: skip
    try:
        started = take_turns(sides, "start", START_SECONDS)
        if started["bare"] != started["enginehouse"]:
            raise RuntimeError(f"the two sides do not run the same: {started}")
        greedy = take_turns(sides, "greedy", TURN_SECONDS, tasks=min(GREEDY_TASKS, episodes // samples))
        if greedy["bare"] != greedy["enginehouse"]:
            raise RuntimeError(f"the two sides do not generate the same: {greedy}")
        turn_of: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
        memory: dict[str, list[dict[str, int]]] = {name: [] for name in sides}
        for number in range(rounds + 1):
            order = list(sides) if number % 2 else list(reversed(sides))
            for name in order:
                took, left = play(sides[name], number)
                if took["most_at_once"] != episodes:
                    raise RuntimeError(f"{name}: {took['most_at_once']} of {episodes} episodes were under way at once")
                memory[name].append(left)
                if number:
                    turn_of[name].append(took)
                logger.info("round %d of %d: %s %.0f tokens/s", number, rounds, name, speed(took))
    finally:
        for side in sides.values():
            side.close()
    return figures(turn_of, memory, longest_sleep(task), episodes) | started["bare"]


def play(side: SideProcess, seed: int) -> tuple[dict[str, float], dict[str, int]]:
    """A turn of a side: what it took, and the memory that is in use after it."""
    took, left = side.ask("run", timeout=TURN_SECONDS, seed=seed), side.ask("memory", timeout=TURN_SECONDS)
    side.pause()
    return took, left


def figures(
    turns: Mapping[str, Sequence[Mapping[str, float]]],
    memory: Mapping[str, Sequence[Mapping[str, int]]],
    sleeps: float,
    episodes: int,
) -> dict[str, Any]:
    """The metrics, and the table's lines.

    Metrics, medians over rounds: `vs_bare`, tokens a second of ours by those of the loop by hand, in the same round;
    `overhead`, by what share a round of ours takes longer than what it cannot do without, the CPU time of the engine's
    own process or the longest that an episode sleeps, whichever is more; `engine_idle`, the share of a round in which
    that process had nothing to do, which others on the machine change least; `.../bare`, the same of the loop by hand,
    whose last episodes leave the engine with little to do, too. And `growth_mb/PART`, by how many million bytes the
    memory of a part of ours grew for every 1,000 episodes, from after the round that is not counted to the end; `bare`
    is the other side's process, which has vLLM's part in it as `replica` has.

    Args:
        turns: what each counted round took, by side.
        memory: bytes in use after each round, that which is not counted too, by side and part.
        sleeps: the longest that an episode sleeps in all, seconds.
        episodes: of a round.
    """
    pairs = list(zip(turns["enginehouse"], turns["bare"], strict=True))
    ratios = [speed(dict(ours)) / speed(dict(bare)) for ours, bare in pairs]
    overheads = {name: [overhead(turn, sleeps) for turn in found] for name, found in turns.items()}
    idle = {name: [engine_idle(turn) for turn in found] for name, found in turns.items()}
    played = (len(memory["enginehouse"]) - 1) * episodes / 1000
    parts = [(part, "enginehouse", part) for part in memory["enginehouse"][0]] + [("bare", "bare", "controller")]
    growth = {
        f"growth_mb/{name}": (memory[side][-1][part] - memory[side][0][part]) / MB / played
        for name, side, part in parts
    }
    return {
        "metrics": {
            "vs_bare": statistics.median(ratios),
            "overhead": statistics.median(overheads["enginehouse"]),
            "overhead/bare": statistics.median(overheads["bare"]),
            "engine_idle": statistics.median(idle["enginehouse"]),
            "engine_idle/bare": statistics.median(idle["bare"]),
            **growth,
        },
        "sides": {name: row(found, memory[name]) for name, found in turns.items()},
        "ratios": ratios,
        "overheads": overheads,
        "engine_idle": idle,
        "longest_sleep_seconds": sleeps,
    }


def overhead(turn: Mapping[str, float], sleeps: float) -> float:
    """By what share a round took longer than its engine and its sleeps."""
    return turn["seconds"] / max(turn["engine_cpu_seconds"], sleeps) - 1


def engine_idle(turn: Mapping[str, float]) -> float:
    """The share of a round in which the engine had nothing to do."""
    return 1 - (turn["engine_cpu_seconds"] + turn["engine_waited_seconds"]) / turn["seconds"]


def row(turns: Sequence[Mapping[str, float]], memory: Sequence[Mapping[str, int]]) -> dict[str, float]:
    """A side's line in the table."""
    speeds = [speed(dict(turn)) for turn in turns]
    parts = [name for name in turns[0] if name.endswith("_seconds")]
    return {
        "tokens_per_second": statistics.median(speeds),
        "slowest": min(speeds),
        "fastest": max(speeds),
        "seconds": statistics.median(turn["seconds"] for turn in turns),
        **{name: statistics.median(turn[name] for turn in turns) for name in parts},
        "tokens": turns[0]["tokens"],
        "controller_mb": memory[-1]["controller"] / MB,
    }
