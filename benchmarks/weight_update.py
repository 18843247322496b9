"""A verified weight update from a training engine to a rollout engine on one host, against a plain copy of its bytes.

It runs real workers, each engine in a separate process and Python environment. The copy and the update take turns. A
second part updates one and then several replicas of a smaller model.
"""

from __future__ import annotations

import logging
import os
import statistics
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.environments import ROOT, interpreter_of
from benchmarks.weight_update_model import write_model

logger = logging.getLogger(__name__)

WORK = ROOT / "benchmarks" / "out" / "weight_update"
PROBE = [list(range(3, 35)), list(range(40, 56))]
TIMEOUT_SECONDS = 600.0
MEMORIES = "/memfd:eh-", "/memfd:enginehouse-weights", "/memfd:enginehouse-differences"
"""Beginnings of the names of memory that holds versions of the weights."""
MANY = 4
"""Replicas of the second part. The names of its metrics have the same number."""
FASTEST_OPTIONS = {"kv_cache_mib": 256, "max_model_tokens": 256, "max_running": 4}
"""Options of those rollout engines that have them. Nothing is generated here, so generation needs little memory."""


@dataclass
class Seconds:
    """Seconds of each round."""

    copy: list[float] = field(default_factory=list)
    fresh_copy: list[float] = field(default_factory=list)
    transfer: list[float] = field(default_factory=list)
    own: list[float] = field(default_factory=list)
    update: list[float] = field(default_factory=list)


def measure(
    parameters: int = 500_000_000,
    rounds: int = 7,
    ranks: int = 1,
    replicas: int = 1,
    train: str = "fsdp",
    rollout: str = "vllm",
    runtime: str = "auto",
    bucket_mib: int = 0,
    device: str = "cpu",
    transport: str = "shared_memory",
    many: bool = True,
    many_parameters: int = 125_000_000,
) -> dict[str, Any]:
    """Update the rollout engine's weights, by `update`, and then those of one and of `MANY` replicas.

    Args:
        many: False leaves the second part out.
        many_parameters: approximate number of parameters of the second part's model. It is smaller, so that `MANY`
            replicas fit into the memory.

    Returns:
        That of `update`, with two further metrics: `replicas_4_vs_1`, the seconds of updates of `MANY` replicas,
        without the engine's loads, over those of one replica; `host_models_4_replicas`, the memory that holds versions
        of the weights beside the engines' own, with `MANY` replicas, in multiples of the model.
    """
    shape = train, rollout, runtime, bucket_mib, device, transport
    measured = update(parameters, rounds, ranks, replicas, *shape)
    if many:
        single, several = (update(many_parameters, rounds, ranks, number, *shape) for number in (1, MANY))
        own = {number: part["sides"]["without the load"] for number, part in ((1, single), (MANY, several))}
        measured["metrics"]["replicas_4_vs_1"] = own[MANY]["seconds"] / own[1]["seconds"]
        measured["metrics"]["host_models_4_replicas"] = several["host_models"]
        measured["sides"] |= {f"{number} replicas of a smaller model": seconds for number, seconds in own.items()}
    return measured


def update(
    parameters: int,
    rounds: int,
    ranks: int,
    replicas: int,
    train: str,
    rollout: str,
    runtime: str = "auto",
    bucket_mib: int = 0,
    device: str = "cpu",
    transport: str = "shared_memory",
) -> dict[str, Any]:
    """Update the rollout engine's weights `rounds` times, after two updates that do not count.

    Args:
        parameters: approximate number of the model's parameters; each is 4 bytes.
        rounds: number of measured updates; there is a plain copy before each.
        ranks: training processes; each writes parts of the weights.
        replicas: rollout processes.
        train: training backend.
        rollout: rollout backend.
        runtime: runtime of the rollout engine, as `engine.runtime` in a config.
        bucket_mib: maximum MiB to send at once; 0: as in a run.
        device: `"cpu"` or `"cuda"`.
        transport: weight transport between the two.

    Returns:
        `metrics` and `sides`. Metrics, medians over rounds: `transfer_vs_memcpy`, seconds of the copy into memory that
        is in use already, divided by seconds of the transfer. The transfer lasts from the first byte sent until the
        last replica has staged the last byte, including checksums on both sides. `update_vs_memcpy`, the same for the
        transfer and the switch without the engine's own load; the effect check, which scores prompts, is not counted.
        `gigabytes_per_second` of the transfer; `update_seconds`, the whole verified update.
    """
    model = WORK / f"model-{parameters}"
    count = write_model(model, parameters)
    logger.info("%.1f million parameters, %s -> %s", count / 1e6, train, rollout)
    found = Seconds()
    roles = placed(str(model), train, rollout, runtime, ranks, replicas, bucket_mib, device, transport)
    with roles as (actor, served, sync):
        served.time_loads()
        logger.info("first update: logprobs differ by %.2g nats", sync.publish(1).effect)
        sync.publish(2)
        for version in range(3, 3 + rounds):
            actor.change()
            found.copy.append(max(actor.execute_all("copy_seconds", False)))
            found.fresh_copy.append(max(actor.execute_all("copy_seconds", True)))
            report = sync.publish(version)
            found.update.append(report.seconds)
            found.transfer.append(max(served.staged()) - min(actor.began()))
            switches = zip(served.commit_seconds(), served.load_seconds(), strict=True)
            found.own.append(found.transfer[-1] + max(commit - load for commit, load in switches))
            logger.info(
                "copy %.3f s, into fresh memory %.3f s, transfer %.3f s, without the load %.3f s, update %.3f s",
                *(series[-1] for series in (found.copy, found.fresh_copy, found.transfer, found.own, found.update)),
            )
        staged = staged_bytes()
        engine = served.describe()[0]["engine"]
    gigabytes = report.nbytes / 1e9
    metrics = {
        "transfer_vs_memcpy": paired(found.copy, found.transfer),
        "update_vs_memcpy": paired(found.copy, found.own),
        "update_seconds": statistics.median(found.update),
        "gigabytes_per_second": gigabytes / statistics.median(found.transfer),
    }
    described = {
        "train": train,
        "rollout": engine,
        "transport": transport,
        "ranks": ranks,
        "replicas": replicas,
        "host_models": staged / report.nbytes,
        "gigabytes": gigabytes,
        "gigabytes_moved": None if report.bytes_moved is None else report.bytes_moved / 1e9,
    }
    return {"metrics": metrics, "sides": rows(found, gigabytes), **described}


def paired(one: list[float], other: list[float]) -> float:
    """Return the median over rounds of the ratio of the first seconds to the second, in the same round."""
    return statistics.median(a / b for a, b in zip(one, other, strict=True))


def rows(found: Seconds, gigabytes: float) -> dict[str, dict[str, float]]:
    """Return the table's lines."""
    named = {
        "plain copy": found.copy,
        "plain copy into fresh memory": found.fresh_copy,
        "transfer": found.transfer,
        "without the load": found.own,
        "verified update": found.update,
    }
    return {
        name: {
            "seconds": statistics.median(seconds),
            "fastest": min(seconds),
            "slowest": max(seconds),
            "gigabytes_per_second": gigabytes / statistics.median(seconds),
        }
        for name, seconds in named.items()
    }


def staged_bytes() -> int:
    """Return the bytes of this host's memory that hold versions of weights for engines in other processes."""
    sizes = {}
    for file in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):  # the process has ended
            if os.readlink(file).startswith(MEMORIES):
                memory = file.stat()
                sizes[memory.st_ino] = memory.st_size
    return sum(sizes.values())


@contextmanager
def placed(
    model: str,
    train: str,
    rollout: str,
    runtime: str,
    ranks: int,
    replicas: int,
    bucket_mib: int,
    device: str,
    transport: str,
    worker: type | None = None,
    further_options: Mapping[str, Any] = MappingProxyType({}),
    env: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[tuple[Any, Any, Any]]:
    """Start the workers of both roles and connect them; end them on the way out.

    Args:
        worker: class of the rollout workers; None: `TimedRolloutWorker`.
        further_options: further options of the rollout engine.
        env: further environment variables of the rollout workers.
    """
    from benchmarks.weight_update_workers import TimedRolloutWorker, TimedTrainWorker
    from enginehouse.controller import ResourcePool, WorkerGroup, WorkerSpec, start_ray
    from enginehouse.engines.model import ModelSpec
    from enginehouse.fleet.fleet import RolloutFleet
    from enginehouse.plugin import plugins, resolve
    from enginehouse.weights.sync import WeightSync

    record = plugins().get("rollout", rollout, elsewhere=True)
    found = interpreter_of(record, runtime, device)
    known = resolve(record.options).model_fields
    options = {name: value for name, value in FASTEST_OPTIONS.items() if name in known} | dict(further_options)
    spec = ModelSpec(model)
    specs = {
        "actor": WorkerSpec(TimedTrainWorker, train, spec, {"lr": 1e-6}).options(env={"PYTHONPATH": str(ROOT)}),
        "rollout": WorkerSpec(worker or TimedRolloutWorker, rollout, spec, options).options(
            python=found.python, env=beside(found.env) | env, distributed=False
        ),
    }
    with ExitStack() as stack:
        stack.enter_context(start_ray())
        groups = {}
        for (name, given), processes in zip(specs.items(), (ranks, replicas), strict=True):
            pool = ResourcePool([processes], gpus_per_process=int(device == "cuda"), name=name)
            stack.callback(pool.shutdown)
            groups[name] = stack.enter_context(
                WorkerGroup(pool, given, name=name, device=device, timeout=TIMEOUT_SECONDS)
            )
        groups["rollout"].launch()
        sync = WeightSync(
            groups["actor"], RolloutFleet.from_group(groups["rollout"]), transport, timeout=TIMEOUT_SECONDS,
            probe=PROBE, effect_check_every=10**9, **bucket_options(bucket_mib),
        )  # fmt: skip
        sync.connect()
        stack.callback(sync.close)
        yield groups["actor"], groups["rollout"], sync


def bucket_options(bucket_mib: int) -> dict[str, int]:
    """Return the options by which `WeightSync` gets the size of buckets."""
    from enginehouse.weights.buckets import BUCKET_BYTES

    return {"bucket_bytes": bucket_mib << 20 if bucket_mib else BUCKET_BYTES}


def beside(env: dict[str, str]) -> dict[str, str]:
    """Return `env` with this project's folder on the path, because it has the workers' classes."""
    paths = [path for path in (env.get("PYTHONPATH"), str(ROOT)) if path]
    return {**env, "PYTHONPATH": os.pathsep.join(paths)}
