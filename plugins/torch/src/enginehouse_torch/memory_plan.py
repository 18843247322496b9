"""Estimates of the `torch` engines' memory, computed from a model's shape. Light to import."""

from __future__ import annotations

from typing import TYPE_CHECKING

from enginehouse.engines.memory import MemoryDemand, MemoryUse
from enginehouse_torch.modeling.sizes import LITTLE_BYTES, block_backward_bytes, block_bytes, cpu_tokens, head_bytes

if TYPE_CHECKING:
    from enginehouse_torch.options import TorchRolloutOptions, TorchTrainOptions

FIRST_COLUMNS = 256
"""Equal to `running_batch.FIRST_COLUMNS`; that module imports torch."""


def train_memory(options: TorchTrainOptions, demand: MemoryDemand) -> MemoryUse:
    """Estimate a training rank's memory: the whole model in float32, and a copy if it computes in a smaller dtype."""
    shape, size = demand.shape, demand.itemsize
    budget = options.tokens_per_microbatch
    budget = min(budget, cpu_tokens(shape, size)) if demand.device == "cpu" else budget
    tokens = demand.tokens(budget, demand.processes)
    logits = head_bytes(tokens, shape.hidden, demand.logits, size, trained=demand.trained)
    block = block_bytes(shape, size) * tokens
    weights = size * shape.parameters
    if not demand.trained:
        return MemoryUse(held={"weights": weights}, working={"activations": block, "head": logits}, measured=True)
    float32_bytes = 4 * shape.parameters
    optimizer = 2 * float32_bytes + (float32_bytes if size < 4 else 0)
    held = {"weights": weights, "optimizer": optimizer, "gradients": float32_bytes}
    blocks = shape.layers * block
    head = size * shape.vocabulary * shape.hidden
    moments = [
        {"activations": blocks + (4 + 2 * size) * shape.hidden * tokens, "head": logits},
        {"activations": blocks + block_backward_bytes(shape, size) * tokens, "temporary gradients": head},
    ]
    return MemoryUse(held=held, working=max(moments, key=lambda moment: sum(moment.values())), measured=True)


def rollout_memory(options: TorchRolloutOptions, demand: MemoryDemand) -> MemoryUse:
    """Estimate a replica's memory, without the weights that the trainer lends it.

    The cache is as wide as the longest row. While it grows from half of that width to the whole width, the old cache
    and the new cache both exist.
    """
    shape, size = demand.shape, demand.itemsize
    running = min(options.max_running, -(-demand.rows // demand.processes))
    columns = min(demand.longest, options.max_model_tokens or demand.longest)
    columns = -(-columns // FIRST_COLUMNS) * FIRST_COLUMNS
    cache = running * columns * shape.cached_per_token * size
    weights = 0 if demand.borrows else size * shape.parameters
    staging = {"staging": weights}  # on a CPU, a small model's staging memory is kept between updates
    keeps_weights = demand.device == "cpu" and weights <= LITTLE_BYTES
    held = {"weights": weights} | (staging if keeps_weights else {})
    return MemoryUse(
        held=held,
        working={"KV cache": cache + cache // 2, "logits": 3 * 4 * running * shape.vocabulary},
        updating={} if keeps_weights else staging,
        note=f"KV cache of {running:,} rows of {columns:,} tokens",
    )
