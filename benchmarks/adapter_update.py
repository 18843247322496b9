"""A weight update that brings an adapter alone, against one that brings all weights with the adapter merged.

Both sides have real workers, each engine in its own process and Python environment, and run together, in turn.
"""

from __future__ import annotations

import logging
import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

import enginehouse.library as eh
from enginehouse.engines.options import LoraOptions

logger = logging.getLogger(__name__)

MODEL = Path("~/.cache/enginehouse/models/smollm2-135m-instruct")
ALONE, MERGED = "the adapter alone", "merged weights"
ROWS, LENGTH = 4, 32
"""Shape of the batch of random tokens on which the adapter is trained between updates."""

OPTIONS = {"kv_cache_mib": 256, "max_model_tokens": 256}


def shrink(tokens: eh.TokenView) -> eh.LossValue:
    """Compute the negative log-likelihood of all tokens."""
    logprobs = tokens.outputs["logprobs"]
    return eh.LossValue(-logprobs.sum(), float(logprobs.numel()))


def measure(
    model: str = str(MODEL),
    rank: int = 16,
    rounds: int = 7,
    rollout: str = "vllm",
    train: str = "fsdp",
    targets: str | tuple[str, ...] = "all-linear",
) -> dict[str, Any]:
    """Update the rollout engine `rounds` times on each side, after one update that does not count.

    Args:
        model: model directory.
        rank: rank of the adapters.
        rounds: number of measured updates; before each, the adapter takes an optimizer step.
        rollout: rollout backend with the capability `adapter_updates`.
        train: training backend with the capability `adapter_updates`.
        targets: `LoraOptions.targets`, the layers that have adapters.

    Returns:
        `metrics`, medians over rounds: `adapter_update_vs_full`, seconds of a verified update of the adapter divided by
        those of merged weights, with the checks that a run does; `adapter_bytes_vs_full`, the same of bytes;
        `adapter_generation_vs_merged`, tokens per second of generation with the adapter, divided by those with merged
        weights.
    """
    path = str(Path(model).expanduser())
    adapter = LoraOptions.model_validate({"rank": rank, "alpha": 2.0 * rank, "targets": targets})
    actor = eh.Engine(train, {"lr": 1e-4, "lora": adapter.model_dump()})
    found: dict[str, dict[str, list[float]]] = {
        side: {"update": [], "stopped": [], "bytes": [], "rate": []} for side in (ALONE, MERGED)
    }
    torch.manual_seed(0)
    rows = torch.randint(100, 1000, (ROWS, LENGTH)).tolist()
    tokens = eh.Ragged.from_list(rows)
    batch = eh.Batch({"input_ids": tokens, "loss_mask": eh.Ragged.from_list([[True] * LENGTH] * ROWS)})
    with ExitStack() as stack:
        sides: dict[str, eh.Roles] = {}
        for side in found:
            spec = eh.ModelSpec(path, adapter=adapter if side == ALONE else None)
            sides[side] = stack.enter_context(
                eh.start_engines(
                    path,
                    actor=actor,
                    rollout=eh.Engine(rollout, OPTIONS, model=spec),
                    placement="separate",
                    probe=rows,
                )
            )
        for version in range(1, 2 + rounds):
            for side, roles in sides.items():
                roles.actor.update(batch, eh.LossSpec("benchmarks.adapter_update:shrink"))
                report = roles.sync.publish(version)
                begun = time.perf_counter()
                drawn = roles.rollout.draw(rows, eh.SamplingParams(max_tokens=32, n=4, ignore_eos=True))
                rate = ROWS * 4 * 32 / (time.perf_counter() - begun)
                assert len(drawn) == ROWS * 4
                logger.info("%s: %.2f s, %d bytes, %.1f tokens/s", side, report.seconds, report.nbytes, rate)
                if version > 1:
                    values = (report.seconds, report.stopped, report.nbytes, rate)
                    for name, value in zip(found[side], values, strict=True):
                        found[side][name].append(value)
    medians = {side: {name: statistics.median(row) for name, row in rows.items()} for side, rows in found.items()}
    alone, merged = medians[ALONE], medians[MERGED]
    return {
        "metrics": {
            "adapter_update_vs_full": alone["update"] / merged["update"],
            "adapter_bytes_vs_full": alone["bytes"] / merged["bytes"],
            "adapter_generation_vs_merged": alone["rate"] / merged["rate"],
        },
        "sides": medians,
        "train": train,
        "rollout": rollout,
        "targets": targets,
    }
