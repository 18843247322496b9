"""Estimates, from a decoder's shape, the memory for its passes in torch, without weights and optimizer state.

The estimates count the tensors that autograd keeps. Tests compare them with runs on tensors without content. This
module imports little, because `plan` uses it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from enginehouse.engines.memory import ModelShape

if TYPE_CHECKING:
    from enginehouse.engines.options import LoraOptions

__all__ = ["adapter_parameters", "block_backward_bytes", "block_bytes", "head_bytes"]

BLOCK = 1 << 27
"""Maximum number of logits that exist at once: in float32 512 MiB, or 832 tokens of a vocabulary of 152,064."""
SCORED_AT_ONCE_ELSEWHERE = 1 << 25
"""Number of logits of a block that are scored at once on a device that `scores.SCORED_AT_ONCE` does not list."""

CPU_PASS_BYTES = 1 << 30
"""Approximate bytes that a pass on a CPU keeps for its backward pass."""
MOST_CPU_TOKENS, LEAST_CPU_TOKENS = 4096, 256
"""Bounds of the padded tokens of a pass on a CPU: more save no time, and fewer would read the weights too often."""
LITTLE_BYTES = 1 << 26
"""Bytes of memory that an engine on a CPU keeps between its calls, because fresh pages would cost more time."""


def cpu_tokens(shape: ModelShape | None, itemsize: int) -> int:
    """Return the maximum number of padded tokens of a pass on a CPU, unless a row is longer. More would save no time.

    Args:
        shape: the model's shape; None if its config does not state it.
        itemsize: bytes of an element of the dtype that the model computes in.
    """
    if shape is None:
        return MOST_CPU_TOKENS
    bytes_per_token = shape.layers * block_bytes(shape, itemsize) + 2 * 4 * shape.vocabulary
    return min(MOST_CPU_TOKENS, max(LEAST_CPU_TOKENS, CPU_PASS_BYTES // bytes_per_token))


def adapter_parameters(lora: LoraOptions, shape: ModelShape) -> int:
    """Return the number of parameters of adapters of all matrices of all blocks."""
    sizes = 4 * shape.hidden + 2 * shape.queries + 2 * shape.keys + 3 * (shape.hidden + shape.feed_forward)
    return shape.layers * lora.rank * sizes


def block_bytes(shape: ModelShape, itemsize: int, split: int = 1) -> int:
    """Return the bytes that a block's forward pass keeps of one token for its backward pass.

    Args:
        shape: the model's shape.
        itemsize: bytes of an element of the dtype that the model computes in.
        split: number of ranks that split each matrix.
    """
    norm = 4 + 2 * itemsize  # the float32 input, the normalised one, and that times the weight
    attention = itemsize * (3 * shape.queries + 2 * shape.keys) + 4 * shape.heads
    if shape.norms_queries:
        attention += (4 + itemsize) * (shape.queries + shape.keys)
    return 2 * norm * shape.hidden + (attention + itemsize * 4 * shape.feed_forward) // split


def block_backward_bytes(shape: ModelShape, itemsize: int, split: int = 1) -> int:
    """Return the peak bytes for one token that a block's backward pass (its feed-forward) adds to `block_bytes`."""
    return itemsize * (3 * shape.feed_forward // split - shape.hidden)


def head_bytes(
    tokens: int, hidden: int, vocabulary: int, itemsize: int, *, trained: bool = True, entropy_gradient: bool = False
) -> int:
    """Return the peak GPU memory of `modeling.scores` beside states, weight and targets.

    It counts the gradients of states and weight, which stay, and ignores single numbers per token.

    Args:
        tokens: number of tokens scored in one micro-batch.
        hidden: size of a hidden state.
        vocabulary: number of rows of this rank's weight, which gets a gradient.
        itemsize: bytes of an element of states and weight.
        trained: True if there is a backward pass.
        entropy_gradient: True if entropies are requested and have a gradient.
    """
    whole, states = tokens * vocabulary <= BLOCK, tokens * hidden
    block = min(tokens * vocabulary, BLOCK)
    exact, rounded = 4 * block, itemsize * block if itemsize < 4 else 0
    scored = 4 * min(block, SCORED_AT_ONCE_ELSEWHERE)
    forward = exact + max(rounded, 2 * scored)
    if not trained:
        return forward
    lasting = vocabulary * hidden * itemsize + states * (itemsize if whole else 4) + (exact if whole else 0)
    made = exact + max(rounded, scored if entropy_gradient else 0)
    multiplied = (rounded or exact) + states * itemsize
    return max(forward, lasting + max(made, multiplied))
