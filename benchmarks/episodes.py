"""Thousands of episodes of many turns at once, with slow tools, against the same loop written by hand.

Each side is a separate process with its own engine. They take turns, and the waiting side is stopped. Our side has
players on the controller's event loop and a replica over Ray, as in a run. The other side is a page of asyncio on
vLLM's asynchronous engine. Greedy episodes of both must be the same, token for token.
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
    """Let the two sides take turns for `rounds` rounds, after one round that does not count.

    Args:
        episodes: episodes of a round, which all begin at once.
        turns: turns of each episode; between two of them the tool is asked.
        rounds: turns of each side.
        sleep: longest time that the tool takes, in seconds.
        parameters: approximate number of the model's parameters.
        samples: episodes of a task, which begin in the same way.
        max_running: completions that the engine generates at once.
        prompt_tokens: tokens of a task's prompt.
        max_tokens: tokens of each turn's answer; no answer ends earlier.
        result_tokens: tokens of the tool's answer.
        runtime: runtime of the engines, as `engine.runtime` in a config.
        device: `"cpu"` or `"cuda"`.

    Returns:
        `metrics` and `sides`; see `figures`.

    Raises:
        ValueError: the episodes do not make whole groups.
        RuntimeError: a side failed, the two generate different tokens, or not all episodes were in progress at once.
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
    """Let a side play a turn; return its figures, and the memory in use after it."""
    took, left = side.ask("run", timeout=TURN_SECONDS, seed=seed), side.ask("memory", timeout=TURN_SECONDS)
    side.pause()
    return took, left


def figures(
    turns: Mapping[str, Sequence[Mapping[str, float]]],
    memory: Mapping[str, Sequence[Mapping[str, int]]],
    sleeps: float,
    episodes: int,
) -> dict[str, Any]:
    """Return the metrics, and the table's lines.

    Metrics are medians over rounds. `vs_bare` is our tokens per second divided by that of the loop, in the same round.
    `overhead` is the fraction by which our round exceeds the time that it needs at least: the CPU time of the engine's
    own process, or the longest sleep of an episode, whichever is more. `engine_idle` is the fraction of a round in
    which that process had nothing to do, which other programs on the machine change least. `.../bare` is the figure of
    the hand-written loop, whose last episodes also leave the engine with little to do. `growth_mb/PART` is the
    growth in million bytes of the memory of a part of ours per 1,000 episodes, from after the uncounted round to the
    end; `bare` is the other side's process, which contains vLLM's part as `replica` does.

    Args:
        turns: figures of each counted round, by side.
        memory: bytes in use after each round, the uncounted one included, by side and part.
        sleeps: longest total sleep of an episode, in seconds.
        episodes: episodes of a round.
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
    """Return the fraction by which a round took longer than its engine and its sleeps."""
    return turn["seconds"] / max(turn["engine_cpu_seconds"], sleeps) - 1


def engine_idle(turn: Mapping[str, float]) -> float:
    """Return the fraction of a round in which the engine had nothing to do."""
    return 1 - (turn["engine_cpu_seconds"] + turn["engine_waited_seconds"]) / turn["seconds"]


def row(turns: Sequence[Mapping[str, float]], memory: Sequence[Mapping[str, int]]) -> dict[str, float]:
    """Return a side's line in the table."""
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
