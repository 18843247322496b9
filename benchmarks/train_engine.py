"""Training engines against hand-written loops for the same model: `fsdp` against FSDP2, `torch` against PyTorch.

It runs real rank processes (gloo on CPU, nccl on GPUs). Sides share these processes and take turns. Model, rows, token
budget, optimizer and numbers are the same, and the first steps' losses and gradient norms must agree. Memory is
measured in separate processes for each side.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.environments import ROOT

logger = logging.getLogger(__name__)

WORK = ROOT / "benchmarks" / "out" / "train_engine"
VOCABULARY = 4096
TOLERANCES = {"loss": 1e-5, "gradient norm": 5e-4}
"""Largest relative differences between sides. On a CPU torch's norm of one tensor, which the bare loop uses, is off by
1e-4 at millions of elements."""
SHARDED_SIDES = ("bare", "fsdp", "fsdp shared", "bare whole")
PLAIN_SIDES = ("bare plain", "torch", "torch shared")
RUN_TIMEOUT_SECONDS = 1800.0
TOY = {"hidden": 64, "layers": 2, "rows": 32, "length": 24, "budget": 2048}

Found = Mapping[str, Any]


def measure(
    ranks: int = 0,
    hidden: int = 256,
    layers: int = 4,
    rows: int = 16,
    length: int = 96,
    budget: int = 768,
    rounds: int = 15,
    steps: int = 1,
    memory_runs: int = 1,
    toy: bool = True,
    device: str = "",
) -> dict[str, Any]:
    """Let the sides take turns for `rounds` rounds.

    Args:
        ranks: processes of the sharded sides; 0: 2, or one per GPU.
        hidden: width of the model (Qwen3's shape, a head for every 64).
        layers: number of its blocks.
        rows: rows of a rank, of which groups of four begin with the same prompt.
        length: tokens of the longest row, of which a quarter is prompt.
        budget: maximum padded tokens of one forward pass.
        rounds: turns of each side.
        steps: optimizer steps of a turn.
        memory_runs: number of processes per side in which memory is measured.
        toy: True to also measure a model of 100 thousand parameters, which shows the cost of all but arithmetic.
        device: `"cpu"` or `"cuda"`; empty: CUDA if there is such a device.

    Returns:
        `metrics` and `sides`. Metrics: `fsdp_vs_bare` and `torch_vs_bare`, our tokens per second divided by those of
        the bare loop, medians of rounds, with no shared prompts; `.../shared` if our side may compute a shared prompt
        once; `.../toy`; `fsdp_memory_vs_bare`, our peak memory divided by that of the bare loop.

    Raises:
        RuntimeError: a rank failed, or two sides do not compute the same.
    """
    import torch

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    ranks = ranks or (torch.cuda.device_count() if device == "cuda" else 2)
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    shape = {"hidden": hidden, "layers": layers, "rows": rows, "length": length, "budget": budget}
    metrics: dict[str, float] = {}
    table: dict[str, dict[str, float]] = {}
    for suffix, size in {"": shape, **({"/toy": TOY} if toy else {})}.items():
        task = {
            **size, "model": str(make_model(size["hidden"], size["layers"])), "vocabulary": VOCABULARY,
            "device": device, "rounds": rounds, "steps": steps,
        }  # fmt: skip
        logger.info("%d rank(s), hidden %d, %d layers", ranks, size["hidden"], size["layers"])
        sharded = run_ranks(task | {"sides": SHARDED_SIDES}, ranks)
        plain = run_ranks(task | {"sides": PLAIN_SIDES}, 1)
        agree(sharded["checked"])
        agree(plain["checked"])
        metrics |= {f"{name}{suffix}": value for name, value in compare(sharded, plain).items()}
        table |= {f"{side}, {ranks} ranks{suffix}": row for side, row in rows_of(sharded).items()}
        table |= {f"{side}, 1 rank{suffix}": row for side, row in rows_of(plain).items()}
        if not suffix and memory_runs:
            peaks = memory_of(task, ranks, memory_runs)
            metrics["fsdp_memory_vs_bare"] = peaks["fsdp"] / peaks["bare"]
            for side, peak in peaks.items():
                table[f"{side}, {ranks} ranks"]["peak_mib"] = peak / 2**20
    return {"metrics": metrics, "sides": table, "device": device, "ranks": ranks, "torch": torch.__version__}


def make_model(hidden: int, layers: int) -> Path:
    """Make a model with random weights in Qwen3's shape."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    path = WORK / f"model-{hidden}-{layers}"
    heads = max(2, hidden // 64)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=hidden, num_hidden_layers=layers, intermediate_size=3 * hidden,
        num_attention_heads=heads, num_key_value_heads=heads // 2, head_dim=hidden // heads,
        max_position_embeddings=4096, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return path


def memory_of(task: Found, ranks: int, runs: int) -> dict[str, float]:
    """Return the peak growth of a rank's memory in bytes, building included: medians of runs, a side per process."""
    peaks: dict[str, list[int]] = {side: [] for side in SHARDED_SIDES}
    for number in range(runs):
        for side, found in peaks.items():
            logger.info("memory, run %d of %d: %s", number + 1, runs, side)
            found.append(run_ranks({**task, "sides": [side], "rounds": 3}, ranks)["memory"])
    return {side: statistics.median(found) for side, found in peaks.items()}


def agree(checked: Mapping[str, Sequence[Sequence[float]]]) -> None:
    """Raise RuntimeError unless all sides have the first side's losses and norms."""
    (first, expected), *others = checked.items()
    for side, found in others:
        for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            for (what, tolerance), own, other in zip(TOLERANCES.items(), ours, theirs, strict=True):
                if not abs(own - other) <= tolerance * abs(other):
                    raise RuntimeError(f"{what} of step {step}: {side} has {own:.8g}, {first} has {other:.8g}")


def compare(sharded: Found, plain: Found) -> dict[str, float]:
    """Return our sides' tokens per second divided by those of their bare loops, in the same round; medians."""
    return {
        "fsdp_vs_bare": paired(sharded, "fsdp", "bare"),
        "fsdp_vs_bare/shared": paired(sharded, "fsdp shared", "bare"),
        "fsdp_vs_bare/whole_logits": paired(sharded, "fsdp", "bare whole"),
        "torch_vs_bare": paired(plain, "torch", "bare plain"),
        "torch_vs_bare/shared": paired(plain, "torch shared", "bare plain"),
    }


def paired(found: Found, side: str, other: str) -> float:
    """Return how many times as fast `side` is as `other`."""
    seconds = found["seconds"]
    return statistics.median(theirs / own for own, theirs in zip(seconds[side], seconds[other], strict=True))


def rows_of(found: Found) -> dict[str, dict[str, float]]:
    """Return the sides' lines in the table."""
    return {
        side: {
            "ms_a_step": 1000 * statistics.median(seconds),
            "fastest": 1000 * min(seconds),
            "slowest": 1000 * max(seconds),
            "tokens_per_second": found["tokens"] / statistics.median(seconds),
        }
        for side, seconds in found["seconds"].items()
    }


def run_ranks(task: Mapping[str, Any], ranks: int) -> Found:
    """Run a task in `ranks` processes (`train_engine_rank`), and return its result.

    Raises:
        RuntimeError: a rank failed, or did not end in time; the message has the last lines that it printed.
    """
    import torch

    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    out, path = WORK / "found.json", WORK / "task.json"
    path.write_text(json.dumps({**task, "out": str(out)}))
    out.unlink(missing_ok=True)
    meeting = {
        "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # this process has the store
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks)),
    }  # fmt: skip
    command = [sys.executable, "-m", "benchmarks.train_engine_rank", str(path)]
    processes: list[subprocess.Popen] = []
    logs = [WORK / f"rank-{rank}.log" for rank in range(ranks)]
    try:
        for rank, log in enumerate(logs):
            env = os.environ | meeting | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            with log.open("w") as output:
                processes.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT))
        wait(processes, logs)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
    return json.loads(out.read_text())


def wait(processes: Sequence[subprocess.Popen], logs: Sequence[Path]) -> None:
    """Wait for all to succeed; raise RuntimeError as soon as one fails, because the others may wait for it."""
    end = time.monotonic() + RUN_TIMEOUT_SECONDS
    while True:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code or (code is None and time.monotonic() > end):
                said = "\n".join(logs[rank].read_text(errors="replace").splitlines()[-30:])
                ended = f"ended with code {code}" if code else f"did not end within {RUN_TIMEOUT_SECONDS:g} s"
                raise RuntimeError(f"rank {rank} of {len(codes)} {ended}\n{said}\n(all of it: {logs[rank]})")
        if all(code == 0 for code in codes):
            return
        time.sleep(0.1)
