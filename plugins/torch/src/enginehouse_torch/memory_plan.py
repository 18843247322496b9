"""How much memory the `torch` engines take, by arithmetic over a model's shape. Light to import."""

from __future__ import annotations

from typing import TYPE_CHECKING

from enginehouse.engines.memory import MemoryDemand, MemoryUse
from enginehouse_torch.modeling.sizes import block_backward_bytes, block_bytes, head_bytes

if TYPE_CHECKING:
    from enginehouse_torch.options import TorchRolloutOptions, TorchTrainOptions

CPU_TOKENS = 4096
"""As in `train`, which imports torch."""
FIRST_COLUMNS = 256
"""As in `running_batch`."""


def train_memory(options: TorchTrainOptions, demand: MemoryDemand) -> MemoryUse:
    """What a rank of the training engine holds: the whole model, in float32, and beside it in a smaller dtype."""
    shape, size = demand.shape, demand.itemsize
    budget = options.tokens_per_microbatch
    tokens = demand.tokens(min(budget, CPU_TOKENS) if demand.device == "cpu" else budget, demand.processes)
    logits = head_bytes(tokens, shape.hidden, demand.logits, size, trained=demand.trained)
    one = block_bytes(shape, size) * tokens
    weights = size * shape.parameters
    if not demand.trained:
        return MemoryUse(held={"weights": weights}, working={"activations": one, "head": logits}, measured=True)
    single = 4 * shape.parameters
    held = {
        "weights": weights,
        "optimizer": 2 * single + (single if size < 4 else 0),
        "gradients": single,
    }
    kept = shape.layers * one
    head = size * shape.vocabulary * shape.hidden
    moments = [
        {"activations": kept + (4 + 2 * size) * shape.hidden * tokens, "head": logits},
        {"activations": kept + block_backward_bytes(shape, size) * tokens, "gradients as they come": head},
    ]
    return MemoryUse(held=held, working=max(moments, key=lambda moment: sum(moment.values())), measured=True)


def rollout_memory(options: TorchRolloutOptions, demand: MemoryDemand) -> MemoryUse:
    """What a replica holds. Its cache is as wide as the longest row, and there twice as it grows to the last time."""
    shape, size = demand.shape, demand.itemsize
    running = min(options.max_running, -(-demand.rows // demand.processes))
    columns = min(demand.longest, options.max_model_tokens or demand.longest)
    columns = -(-columns // FIRST_COLUMNS) * FIRST_COLUMNS
    cache = running * columns * shape.cached_per_token * size
    weights = size * shape.parameters
    room = {"staging": weights}  # on a CPU it is kept from update to update
    held = {"weights": weights} | (room if demand.device == "cpu" else {})
    return MemoryUse(
        held=held,
        working={"KV cache": cache + cache // 2, "logits": 3 * 4 * running * shape.vocabulary},
        updating={} if demand.device == "cpu" else room,
        note=f"KV cache of {running:,} rows of {columns:,} tokens",
    )
