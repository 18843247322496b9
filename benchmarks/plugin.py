"""A plugin that benchmarks add to a run (`benchmarks.runs.with_plugin`): it pins roles to cores and measures CPU time.

`ENGINEHOUSE_BENCHMARKS_PINNED=actor:1,rollout:0` in the environment pins each role's processes to a core once they are
up. Each step's metrics have `cpu/ROLE`, the CPU seconds of the role's processes, and `cpu/controller`, those of the
program itself. They also have the times when the step began and ended, by `time.monotonic()`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

from enginehouse.plugin import Advantage, RolloutBackend, TrainBackend, hookimpl
from enginehouse.plugin.capabilities import PAUSE_KEEP, PROMPT_LOGPROBS, SEED, WEIGHT_CHECKSUMS

enginehouse_protocol = "1.0"

PINNED = "ENGINEHOUSE_BENCHMARKS_PINNED"

_pids: dict[str, list[int]] = {"controller": [os.getpid()]}


@hookimpl
def enginehouse_register_backends(register):
    register(
        RolloutBackend(
            name="heavy-tail",
            summary="The torch engine with drawn lengths of responses; for benchmarks",
            engine="benchmarks.heavy_tail:HeavyTailRolloutEngine",
            options="enginehouse_torch.options:TorchRolloutOptions",
            capabilities={SEED, PROMPT_LOGPROBS, PAUSE_KEEP, WEIGHT_CHECKSUMS},
        )
    )
    register(
        TrainBackend(
            name="shapes",
            summary="Takes batches and computes nothing; for benchmarks",
            engine="benchmarks.shapes:ShapesTrainEngine",
            options="enginehouse_torch.options:TorchTrainOptions",
        )
    )
    register(
        RolloutBackend(
            name="shapes",
            summary="Answers at once, with random tokens; for benchmarks",
            engine="benchmarks.shapes:ShapesRolloutEngine",
            options="enginehouse_torch.options:TorchRolloutOptions",
            capabilities={SEED, PROMPT_LOGPROBS, WEIGHT_CHECKSUMS},
        )
    )


@hookimpl
def enginehouse_register_advantages(register):
    register(
        Advantage(
            name="surprise",
            summary="Reads every token's logprob; for benchmarks",
            function="benchmarks.shapes:by_surprise",
            needs=("reward", "loss_mask", "rollout_logprobs"),
        )
    )


@hookimpl
def enginehouse_run_started(run):
    cores = dict(pair.split(":") for pair in os.environ.get(PINNED, "").split(",") if pair)
    for role, processes in run.roles.describe().items():
        _pids[role] = [process["pid"] for process in processes]
        for pid in _pids[role] if role in cores else ():
            pin(pid, int(cores[role]))


@hookimpl(wrapper=True)
def enginehouse_run_step(run, step):
    before = {role: cpu_seconds(pids) for role, pids in _pids.items()}
    began = time.monotonic()
    metrics = yield
    ended = time.monotonic()
    spent = {f"cpu/{role}": cpu_seconds(pids) - before[role] for role, pids in _pids.items()}
    return {**metrics, **spent, "clock/began": began, "clock/ended": ended}


def pin(pid: int, core: int) -> None:
    """Keep a process with all its threads on a core."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(thread), {core})


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the CPU seconds that processes have used so far."""
    import psutil

    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)
