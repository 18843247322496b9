"""An estimate of the memory of a rank of the `fsdp` engine, computed from a model's shape. Light to import."""

from __future__ import annotations

from typing import TYPE_CHECKING

from enginehouse.engines.memory import MemoryDemand, MemoryUse
from enginehouse_fsdp.axes import CONTEXT, REPLICATE, SHARD, TENSOR, axis_sizes
from enginehouse_torch.modeling.sizes import adapter_parameters, block_backward_bytes, block_bytes, head_bytes

if TYPE_CHECKING:
    from enginehouse_fsdp.options import FSDPOptions

BUCKET_BYTES = 256 << 20
"""Bytes of weights gathered at once. Two buckets exist: one is being gathered while the other is read."""


def memory_use(options: FSDPOptions, demand: MemoryDemand) -> MemoryUse:
    """Estimate a rank's peak memory, the largest of three moments: in the output head, in the last block's backward
    pass, and while the outermost unit's gradient is summed over the ranks.

    FSDP gathers a unit in the dtype of the computation, together with the next unit if there is one, and sums its
    gradient in `reduce_dtype`. A unit's memory is freed for good only when the next unit comes.
    """
    shape, size = demand.shape, demand.itemsize
    sizes = axis_sizes(demand.processes, options)
    split, context = sizes.get(TENSOR, 1), sizes.get(CONTEXT, 1)
    sharing = sizes[SHARD] * context * split
    shares = sizes[SHARD] * sizes.get(REPLICATE, 1)
    tokens = demand.tokens(options.tokens_per_microbatch, shares) // context
    block, root = size * shape.block_parameters // split, size * shape.root_parameters // split
    shards = 4 * shape.parameters // sharing
    trained = adapter_parameters(options.lora, shape) if options.lora is not None else shape.parameters
    states = 4 * trained // (1 if options.lora is not None else sharing) if demand.trained else 0
    held = {"weights": shards, "optimizer": 2 * states}
    gathered = root + (shape.layers * block if not options.reshard_after_forward else 0)
    block_activations = block_bytes(shape, size, split) * tokens
    activations = shape.layers * (
        size * shape.hidden * tokens if options.activation_checkpointing else block_activations
    )
    logits = head_bytes(tokens, shape.hidden, -(-demand.logits // split), size, trained=demand.trained)
    moments = [{"gathered": gathered + 2 * block, "activations": block_activations, "head": logits}]
    if demand.trained:
        reduced = 4 if options.reduce_dtype == "float32" or size == 4 else 2
        whole = 0 if options.lora is not None else 1
        recomputed = block_activations if options.activation_checkpointing else 0
        units = (3 if recomputed else 2) * block if options.reshard_after_forward else 0
        norm = (4 + 2 * size) * shape.hidden * tokens
        head = size * shape.vocabulary * shape.hidden // split
        matrix = size * shape.hidden * shape.feed_forward // split
        sums = reduced * shape.root_parameters // split
        moments = [
            {"gathered": gathered, "gradients": states, "activations": activations + norm, "head": logits},
            {
                "gathered": gathered + units,
                "gradients": states + whole * (head + matrix),
                "activations": activations + recomputed + block_backward_bytes(shape, size, split) * tokens,
            },
            {"gathered": gathered - root, "gradients": states + whole * max(root + sums, sums + 2 * sums // sharing)},
        ]
    fullest = max(moments, key=lambda moment: sum(moment.values()))
    host = 0
    if options.cpu_offload and demand.device == "cuda":
        host, held = sum(held.values()) + states, {}
        fullest["gradients"] = fullest.get("gradients", 0) - states
    return MemoryUse(held=held, working=fullest, updating={"staging": 2 * BUCKET_BYTES}, host=host, measured=True)
