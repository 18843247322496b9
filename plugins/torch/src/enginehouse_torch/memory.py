"""How much memory training in torch takes, by arithmetic over a model's shape. Light to import.

It counts what autograd keeps of transformers' decoders; `tests/torch/test_memory_plan.py` compares it with tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from enginehouse.engines.memory import MemoryDemand, MemoryUse, ModelShape

if TYPE_CHECKING:
    from enginehouse_torch.options import TorchRolloutOptions, TorchTrainOptions

__all__ = ["block_backward_bytes", "block_bytes", "head_bytes"]

CPU_TOKENS = 4096
"""As in `train`, which imports torch."""
FIRST_COLUMNS = 256
"""As in `running`."""

SCORED_AT_ONCE = 1 << 26
"""`SCORED_AT_ONCE_ELSEWHERE` of `modeling.heads`: logits."""


def block_bytes(shape: ModelShape, itemsize: int, split: int = 1) -> int:
    """What a block's forward pass keeps of one token for its backward pass.

    Args:
        shape: the model's.
        itemsize: bytes of an element of what is computed in.
        split: ranks that split each matrix.
    """
    norm = 4 + 2 * itemsize  # the float32 input, the normalised one, and that times the weight
    attention = itemsize * (3 * shape.queries + 2 * shape.keys) + 4 * shape.heads
    if shape.norms_queries:
        attention += (4 + itemsize) * (shape.queries + shape.keys)
    return 2 * norm * shape.hidden + (attention + itemsize * 4 * shape.feed_forward) // split


def block_backward_bytes(shape: ModelShape, itemsize: int, split: int = 1) -> int:
    """What a block's backward pass needs of one token beside `block_bytes`, when that is most: in the feed-forward."""
    return itemsize * (3 * shape.feed_forward // split - shape.hidden)


def head_bytes(tokens: int, hidden: int, vocabulary: int, itemsize: int, trained: bool) -> int:
    """The most that logits and what is made of them take, forward and backward.

    Args:
        tokens: how many are scored in one micro-batch.
        hidden: size of a hidden state.
        vocabulary: of this rank.
        itemsize: bytes of an element of what is computed in.
        trained: whether there is a backward pass.
    """
    logits = 4 * tokens * vocabulary
    rounded = itemsize * tokens * vocabulary if itemsize < 4 else 0
    scored = 3 * 4 * min(tokens * vocabulary, SCORED_AT_ONCE)
    return logits + max(rounded, scored, logits if trained else 0)


def train_memory(options: TorchTrainOptions, demand: MemoryDemand) -> MemoryUse:
    """What a rank of the training engine holds: the whole model, in float32, and beside it in a smaller dtype."""
    shape, size = demand.shape, demand.itemsize
    budget = options.tokens_per_microbatch
    tokens = demand.tokens(min(budget, CPU_TOKENS) if demand.device == "cpu" else budget, demand.processes)
    logits = head_bytes(tokens, shape.hidden, demand.logits, size, demand.trained)
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
