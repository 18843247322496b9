"""What training a transformers decoder in torch takes beside its state, in bytes, by arithmetic over its shape.

It counts what autograd keeps; tests compare it with tensors without content. Light to import: `plan` does.
"""

from __future__ import annotations

from enginehouse.engines.memory import ModelShape

__all__ = ["block_backward_bytes", "block_bytes", "head_bytes"]

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
