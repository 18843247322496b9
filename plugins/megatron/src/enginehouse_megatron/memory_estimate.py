"""How much memory a rank of the `megatron` engine takes, by arithmetic compared with nothing. Light to import."""

from __future__ import annotations

from typing import TYPE_CHECKING

from enginehouse.engines.memory import MemoryDemand, MemoryUse
from enginehouse_torch.modeling.sizes import block_bytes, head_bytes

if TYPE_CHECKING:
    from enginehouse_megatron.options import MegatronOptions

BUCKET_BYTES = 256 << 20
"""How many bytes of weights are put together at once, a larger tensor excepted."""


def memory_use(options: MegatronOptions, demand: MemoryDemand) -> MemoryUse:
    """What a rank of the first stage holds while as many micro-batches are under way as there are stages.

    Gradients are float32 in one buffer; the float32 copy and the moments are shared out over data-parallel ranks.
    """
    shape, size = demand.shape, demand.itemsize
    split, stages, context = options.tensor_parallel, options.pipeline_parallel, options.context_parallel
    shares = max(1, demand.processes // (split * stages * context))
    tokens = demand.tokens(options.tokens_per_microbatch, shares) // context
    layers = -(-shape.layers // stages)
    ends = shape.root_parameters if stages == 1 else shape.vocabulary * shape.hidden
    own = (layers * shape.block_parameters + ends) // split
    one = block_bytes(shape, size, split) * tokens
    logits = head_bytes(tokens, shape.hidden, -(-demand.logits // split), size, trained=demand.trained)
    held = {"weights": size * own}
    working = {"activations": one, "head": logits}
    if demand.trained:
        held |= {"gradients": 4 * own, "optimizer": (12 if size < 4 else 8) * own // (shares * context)}
        kept = size * shape.hidden * tokens if options.recompute == "full" else one
        working["activations"] = kept * min(layers * stages, shape.layers) + one
    return MemoryUse(held=held, working=working, updating={"staging": 2 * BUCKET_BYTES})
