"""What the processes of a tensor-parallel engine read of a weight update, against the slices that they hold.

Such an engine gets a version once, in the memory of its host, and each of its processes copies its own slices from
there. A second part plans a transfer in which training ranks send slices straight to engine processes.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.weight_update import WORK, placed
from benchmarks.weight_update_model import describe, write_model
from benchmarks.weight_update_workers import TimedRolloutWorker
from enginehouse.controller import register
from enginehouse.engines.weights import ParamMeta
from enginehouse.weights.read_back import ReadBack

logger = logging.getLogger(__name__)

COUNTS = "BYTES_READ"
"""Environment variable with the directory in which each process of an engine writes the bytes that it has read."""
PROCESSES = 2
"""Processes of the engine."""
ENV = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
"""Environment of vLLM with two processes on a CPU, into which a function can be sent."""
RANKS = 16
"""Training ranks of the plan, and engine processes."""
LAYOUTS = {"fully sharded": ((RANKS,), ("S0",)), "hybrid": ((2, RANKS // 2), ("R", "S0"))}
"""Mesh and placements of the plan's training ranks."""


class ByteCounter(TorchDispatchMode):
    """Counts the bytes of staged tensors that operations read while it is active. A view reads nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes_read = 0
        self._staged: dict[int, StorageWeakRef] = {}  # a weak reference keeps the key from being used again

    def follow(self, staged: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Forget an earlier version, and yield staged tensors; what is read of them is counted from now on."""
        self._staged.clear()
        for name, tensor in staged:
            storage = tensor.untyped_storage()
            self._staged[storage._cdata] = StorageWeakRef(storage)
            yield name, tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        planned = func is torch.ops.aten.copy_.default and args[0].is_meta  # no memory is copied to
        for value in () if func.is_view or planned else (*args, *(kwargs or {}).values()):
            if isinstance(value, torch.Tensor) and value.untyped_storage()._cdata in self._staged:
                self.bytes_read += value.nbytes
        return func(*args, **(kwargs or {}))


def count_reads(_worker: Any = None) -> None:
    """Count, in this process of an engine, what each load reads. The comparison after the load is not counted."""
    counter, watch, follow, compare = ByteCounter(), ReadBack.watch, ReadBack.follow, ReadBack.compare

    def watch_and_count(self: ReadBack) -> ExitStack:
        contexts = ExitStack()
        contexts.enter_context(watch(self))
        contexts.enter_context(counter)
        return contexts

    def write_and_compare(self: ReadBack, *args: Any) -> Any:
        Path(os.environ[COUNTS], str(os.getpid())).write_text(str(counter.bytes_read))
        counter.bytes_read = 0
        return compare(self, *args)

    patch.object(ReadBack, "watch", watch_and_count).start()
    patch.object(ReadBack, "follow", lambda self, staged: counter.follow(follow(self, staged))).start()
    patch.object(ReadBack, "compare", write_and_compare).start()


class CountingRolloutWorker(TimedRolloutWorker):
    """A replica of vLLM or SGLang whose processes count what they read."""

    @register
    async def launch(self) -> str:
        """See `RolloutWorker`."""
        if self._record.name == "vllm":
            launched = await super().launch()
            await self.engine.native.collective_rpc(count_reads)
            return launched
        for user in ("starting", "weight_updates"):
            patch(f"enginehouse_sglang.{user}.LOADER", f"{__name__}.load").start()
        return await super().launch()


def load(model: Any, named_tensors: Any) -> None:
    """SGLang's loader, in a process that counts."""
    from enginehouse_sglang import loader

    if ReadBack.compare.__name__ == "compare":
        count_reads()
    loader.load(model, named_tensors)


def measure(
    parameters: int = 50_000_000, rollouts: str = "vllm,sglang", train: str = "torch", runtime: str = "auto"
) -> dict[str, Any]:
    """Update engines of two processes, and plan a transfer of Qwen3-30B-A3B.

    Args:
        parameters: approximate number of parameters of the updated model.
        rollouts: rollout backends that load a version in processes of their own.
        train: training backend.
        runtime: runtime of the rollout engines, as `engine.runtime` in a config.

    Returns:
        `metrics` and `sides`. Metrics: `moved_vs_minimum`, bytes that the engine's processes read of an update divided
        by the bytes of the slices that they hold, of the engine that reads most; `planned_vs_minimum`, the same of the
        plan's moves; `plan_seconds`, the time to plan and to list one rank's moves, of the slower layout.
    """
    model = WORK / f"model-{parameters}"
    write_model(model, parameters)
    _, shapes = describe(parameters)
    held = sum(4 * shape.numel() * (PROCESSES if len(shape) == 1 else 1) for shape in shapes.values())
    read = {rollout: max(_read_bytes(str(model), train, rollout, runtime)) / held for rollout in rollouts.split(",")}
    plans = {name: _plan(*layout) for name, layout in LAYOUTS.items()}
    return {
        "metrics": {
            "moved_vs_minimum": max(read.values()),
            "planned_vs_minimum": max(plan["moved_vs_minimum"] for plan in plans.values()),
            "plan_seconds": max(plan["seconds"] for plan in plans.values()),
        },
        "sides": {rollout: {"moved_vs_minimum": share} for rollout, share in read.items()} | plans,
    }


def _read_bytes(model: str, train: str, rollout: str, runtime: str) -> list[int]:
    """Return the bytes that the processes together read of each of two updates. Only the first is recorded."""
    counts = []
    with TemporaryDirectory() as directory:
        options = {"tensor_parallel": PROCESSES}
        env = {**(ENV if rollout == "vllm" else {}), COUNTS: directory}
        engines = placed(
            model, train, rollout, runtime, 1, 1, 0, "cpu", "shared_memory", CountingRolloutWorker, options, env
        )
        with engines as (_, _, sync):
            for version in (1, 2):
                sync.publish(version)
                files = list(Path(directory).iterdir())
                assert len(files) == PROCESSES, f"{rollout}: {len(files)} of {PROCESSES} processes have counted"
                counts.append(sum(int(file.read_text()) for file in files))
                logger.info("%s: version %d, %d bytes read", rollout, version, counts[-1])
    return counts


def _plan(mesh: tuple[int, ...], placements: tuple[str, ...]) -> dict[str, float]:
    """Plan moves from a layout of training ranks to engine processes, and list one rank's moves."""
    from enginehouse_transports.resharding import plan_reshard

    ranks = tuple(range(RANKS))
    sources, targets = [], []
    for name, shape, split in experts_model():
        sources.append(ParamMeta(name, "bfloat16", shape, ranks, mesh, placements))
        targets.append(ParamMeta(name, "bfloat16", shape, ranks, (RANKS,), (split,)))
    begun = time.perf_counter()
    plan = plan_reshard(sources, targets, RANKS, RANKS)
    plan.moves_to(RANKS - 1)
    seconds = time.perf_counter() - begun
    logger.info("%.2f s for %s", seconds, plan)
    return {"moved_vs_minimum": plan.bytes_moved / plan.bytes_minimum, "seconds": seconds, "moves": len(plan)}


def experts_model() -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Yield name and shape of each parameter of Qwen3-30B-A3B, and its placement over tensor-parallel processes."""
    layers, experts, hidden, inner, vocabulary, queries, keys, head = 48, 128, 2048, 768, 151936, 32, 4, 128
    yield "model.embed_tokens.weight", (vocabulary, hidden), "S0"
    for layer in range(layers):
        block = f"model.layers.{layer}"
        yield f"{block}.self_attn.q_proj.weight", (queries * head, hidden), "S0"
        for name in ("k_proj", "v_proj"):
            yield f"{block}.self_attn.{name}.weight", (keys * head, hidden), "S0"
        yield f"{block}.self_attn.o_proj.weight", (hidden, queries * head), "S1"
        for name, length in (
            ("self_attn.q_norm", head),
            ("self_attn.k_norm", head),
            ("input_layernorm", hidden),
            ("post_attention_layernorm", hidden),
        ):
            yield f"{block}.{name}.weight", (length,), "R"
        yield f"{block}.mlp.gate.weight", (experts, hidden), "R"
        for expert in range(experts):
            for name in ("gate_proj", "up_proj"):
                yield f"{block}.mlp.experts.{expert}.{name}.weight", (inner, hidden), "S0"
            yield f"{block}.mlp.experts.{expert}.down_proj.weight", (hidden, inner), "S1"
    yield "model.norm.weight", (hidden,), "R"
    yield "lm_head.weight", (vocabulary, hidden), "S0"
