"""Rollout engines through a rollout worker, against the same engine called directly with the same requests.

Each side is a separate process under the runtime's interpreter, with its own engine. They take turns, and the waiting
side is stopped. Greedy completions of both must be the same.
"""

from __future__ import annotations

import json
import logging
import os
import random
import statistics
import sys
from typing import Any

from benchmarks.dispatch_side import SideProcess
from benchmarks.environments import ROOT, interpreter_of
from benchmarks.weight_update_model import write_model

logger = logging.getLogger(__name__)

WORK = ROOT / "benchmarks" / "out" / "rollout_engine"
OURS = "benchmarks.rollout_engine_ours"
BARE = {"vllm": "benchmarks.rollout_engine_vllm", "sglang": "benchmarks.rollout_engine_sglang"}
"""The module that calls each engine directly, by backend."""
START_SECONDS = 600.0
TURN_SECONDS = 600.0


def measure(
    backend: str = "vllm",
    rounds: int = 9,
    parameters: int = 5_000_000,
    prompts: int = 32,
    n: int = 8,
    prompt_tokens: int = 32,
    max_tokens: int = 64,
    runtime: str = "auto",
    device: str = "cpu",
) -> dict[str, Any]:
    """Let the two sides take turns for `rounds` rounds, after one round that does not count.

    Args:
        backend: backend of the engine, a key of `BARE`.
        rounds: turns of each side.
        parameters: approximate number of the model's parameters; the smaller, the more everything else counts.
        prompts: requests of a turn, all at once.
        n: samples of each request.
        prompt_tokens: tokens of a prompt.
        max_tokens: tokens of a sample; no sample ends earlier.
        runtime: runtime of both sides, as `engine.runtime` in a config.
        device: `"cpu"` or `"cuda"`.

    Returns:
        `metrics` and `sides`. Metrics: `BACKEND_vs_bare`, our generated tokens per second divided by those of the
        engine called directly, in the same round, median over rounds.

    Raises:
        RuntimeError: a side failed, or the two generate different tokens.
    """
    from enginehouse.plugin import plugins

    found = interpreter_of(plugins().get("rollout", backend, elsewhere=True), runtime, device)
    model = WORK / f"model-{parameters}"
    write_model(model, parameters)
    draw = random.Random(0)
    task = {
        "backend": backend, "model": str(model), "device": device, "n": n, "max_tokens": max_tokens,
        "max_running": prompts * n, "max_model_tokens": prompt_tokens + max_tokens, "kv_cache_mib": 512,
        "native": native_arguments(backend, prompts * n * prompt_tokens),
        "prompts": [[draw.randrange(10, 8000) for _ in range(prompt_tokens)] for _ in range(prompts)],
    }  # fmt: skip
    path = WORK / "task.json"
    path.write_text(json.dumps(task))
    env = environment_of(backend, found.env, device)
    python = found.python or sys.executable
    sides = {name: SideProcess(name, [python, "-m", module, path], WORK / f"{name}.log", cwd=ROOT, env=env)
             for name, module in {"bare": BARE[backend], "enginehouse": OURS}.items()}  # fmt: skip
    try:
        started = take_turns(sides, "start", START_SECONDS)
        if started["bare"] != started["enginehouse"]:
            raise RuntimeError(f"the two sides do not run the same: {started}")
        greedy = take_turns(sides, "greedy", TURN_SECONDS)
        if greedy["bare"] != greedy["enginehouse"]:
            raise RuntimeError(f"the two sides do not generate the same: {greedy}")
        take_turns(sides, "run", TURN_SECONDS, seed=0)
        turns: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
        for number in range(1, rounds + 1):
            order = list(sides) if number % 2 else list(reversed(sides))
            in_order = {name: sides[name] for name in order}
            for name, turn in take_turns(in_order, "run", TURN_SECONDS, seed=number).items():
                turns[name].append(turn)
            logger.info(
                "round %d of %d: %s tokens/s", number, rounds,
                ", ".join(f"{name} {speed(turns[name][-1]):.0f}" for name in sides),
            )  # fmt: skip
    finally:
        for side in sides.values():
            side.close()
    ratios = [speed(ours) / speed(bare) for ours, bare in zip(turns["enginehouse"], turns["bare"], strict=True)]
    return {
        "metrics": {f"{backend}_vs_bare": statistics.median(ratios)},
        "sides": rows(turns),
        "ratios": ratios,
        **started["bare"],
    }


def take_turns(sides: dict[str, SideProcess], do: str, timeout: float, **arguments: Any) -> dict[str, Any]:
    """Ask one side after the other; each is stopped when it is not its turn."""
    answers = {}
    for name, side in sides.items():
        answers[name] = side.ask(do, timeout=timeout, **arguments)
        side.pause()
    return answers


def native_arguments(backend: str, prompt_tokens: int) -> dict[str, Any]:
    """Return the engine's arguments of both sides; `prompt_tokens` is the sum over all samples of a turn."""
    # vllm 0.32 on a CPU dies if a seeded prompt does not fit into a batch as a whole
    return {"max_num_batched_tokens": prompt_tokens} if backend == "vllm" else {}


def environment_of(backend: str, given: Any, device: str) -> dict[str, str]:
    """Return the environment variables of both sides: those that the plugin sets, and the worker's path."""
    ours: dict[str, str] = {}
    if backend == "vllm":
        from enginehouse_vllm.starting import CPU_ENVIRONMENT, ENVIRONMENT

        ours = ENVIRONMENT | (CPU_ENVIRONMENT if device == "cpu" else {})
    if backend == "sglang":
        from enginehouse_sglang.starting import ENVIRONMENT as OF_SERVER

        ours = dict(OF_SERVER)
    paths = [path for path in (given.get("PYTHONPATH"), str(ROOT)) if path]
    return {**os.environ, **ours, **given, "PYTHONPATH": os.pathsep.join(paths)}


def speed(turn: dict[str, float]) -> float:
    """Return tokens per second."""
    return turn["tokens"] / turn["seconds"]


def rows(turns: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Return the table's lines."""
    return {
        name: {
            "tokens_per_second": statistics.median(map(speed, found)),
            "slowest": min(map(speed, found)),
            "fastest": max(map(speed, found)),
            "tokens": found[0]["tokens"],
        }
        for name, found in turns.items()
    }
