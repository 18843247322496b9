"""Estimates the memory of a rank of the `megatron` engine; not compared with measurements. Light to import."""

from __future__ import annotations

from typing import TYPE_CHECKING

from enginehouse.engines.memory import MemoryDemand, MemoryUse
from enginehouse_torch.modeling.sizes import adapter_parameters, block_bytes, head_bytes

if TYPE_CHECKING:
    from enginehouse_megatron.options import MegatronOptions

BUCKET_BYTES = 256 << 20
"""Bytes of weights that are joined at once, unless a single tensor is larger."""


def memory_use(options: MegatronOptions, demand: MemoryDemand) -> MemoryUse:
    """Estimate the memory of a rank of the first pipeline stage, when one micro-batch for each stage is in progress.

    Gradients are float32 in one buffer. Data-parallel ranks divide the float32 copy and the moments among them. Of a
    model with adapters only these have gradients and moments, and are counted as if no rank split them.
    """
    shape, size = demand.shape, demand.itemsize
    split, stages, context = options.tensor_parallel, options.pipeline_parallel, options.context_parallel
    shares = max(1, demand.processes // (split * stages * context))
    tokens = demand.tokens(options.tokens_per_microbatch, shares) // context
    layers = -(-shape.layers // stages)
    ends = shape.root_parameters if stages == 1 else shape.vocabulary * shape.hidden
    own = (layers * shape.block_parameters + ends) // split
    block = block_bytes(shape, size, split) * tokens
    logits = head_bytes(tokens, shape.hidden, -(-demand.logits // split), size, trained=demand.trained)
    held = {"weights": size * own}
    working = {"activations": block, "head": logits}
    if demand.trained:
        trained = own
        if options.lora is not None:
            trained = layers * adapter_parameters(options.lora, shape) // shape.layers
        held |= {"gradients": 4 * trained, "optimizer": (12 if size < 4 else 8) * trained // (shares * context)}
        saved = size * shape.hidden * tokens if options.recompute == "full" else block
        working["activations"] = saved * min(layers * stages, shape.layers) + block
    return MemoryUse(held=held, working=working, updating={"staging": 2 * BUCKET_BYTES})
