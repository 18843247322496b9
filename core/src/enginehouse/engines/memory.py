"""Estimate of an engine's memory before a process starts: its input and its result. The module has few imports.

Amounts are numbers of bytes on the device of one rank. They are computed from a model's `config.json`, and do not
include the bytes that an allocator loses between blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from enginehouse.engines.model import Device

__all__ = ["PROCESS_BYTES", "MemoryDemand", "MemoryUse", "ModelShape", "server_memory"]

EXACT = frozenset({"llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"})
"""Models (`model_type`) whose parameters a `ModelShape` counts completely."""
NORMED_QUERIES = frozenset({"qwen3", "qwen3_moe"})
BIASED_QUERIES = frozenset({"qwen2", "qwen2_moe"})


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """Sizes of a decoder: blocks of attention and gated feed-forward layers between an embedding and a head.

    Attributes:
        layers: number of blocks.
        hidden: size of a hidden state.
        vocabulary: number of rows of the embedding.
        heads: number of attention heads.
        queries: number of elements of the queries of one token, over all heads.
        keys: number of elements of the keys of one token, over all heads.
        feed_forward: inner feed-forward size that one token passes; with experts, the sum over its active experts.
        block_parameters: number of parameters of one block.
        norms_queries: True if the queries and keys of each head are normalised.
        tied: True if the head shares the embedding's weight.
        exact: True if models of this kind have no parameters that these sizes leave out.
    """

    layers: int
    hidden: int
    vocabulary: int
    heads: int
    queries: int
    keys: int
    feed_forward: int
    block_parameters: int
    norms_queries: bool
    tied: bool
    exact: bool

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ModelShape | None:
        """Return the shape of a decoder from its `config.json`; None if the config does not state it."""
        sizes: list[int] = [config[name] for name in _NEEDED if isinstance(config.get(name), int)]
        if len(sizes) < len(_NEEDED):
            return None
        hidden, layers, heads, vocabulary, inner = sizes
        kind = config.get("model_type")
        head = config.get("head_dim") or hidden // heads
        queries, keys = heads * head, (config.get("num_key_value_heads") or heads) * head
        bias = kind in BIASED_QUERIES
        attention = 2 * hidden * (queries + keys) + bias * (queries + 2 * keys)
        if config.get("attention_bias"):
            attention += queries + 2 * keys + hidden
        normed = kind in NORMED_QUERIES
        experts = config.get("num_experts") or config.get("num_local_experts") or 0
        used, shared = experts and config.get("num_experts_per_tok", 2), 0
        if experts:
            inner = config.get("moe_intermediate_size") or inner
            shared = config.get("shared_expert_intermediate_size") or 0
        feed_forward = 3 * hidden * (inner * (experts or 1) + shared) + hidden * experts + (hidden if shared else 0)
        if config.get("mlp_bias"):
            feed_forward += 2 * inner + hidden
        return cls(
            layers=layers,
            hidden=hidden,
            vocabulary=vocabulary,
            heads=heads,
            queries=queries,
            keys=keys,
            feed_forward=inner * (used or 1) + shared,
            block_parameters=attention + feed_forward + 2 * hidden + normed * 2 * head,
            norms_queries=normed,
            tied=bool(config.get("tie_word_embeddings", False)),
            exact=kind in EXACT,
        )

    @property
    def root_parameters(self) -> int:
        """Number of parameters outside of blocks: embedding, last norm and head."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2) + self.hidden

    @property
    def parameters(self) -> int:
        """Number of all parameters."""
        return self.layers * self.block_parameters + self.root_parameters

    @property
    def cached_per_token(self) -> int:
        """Number of elements of the keys and values of one token, over all layers."""
        return 2 * self.layers * self.keys


_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size")


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryDemand:
    """The work that a role will do.

    Attributes:
        shape: shape of the role's model.
        head: head of the model, as in `ModelSpec`.
        itemsize: bytes per element of the dtype in which the role computes.
        processes: number of processes that run the role.
        rows: maximum number of rows of one call, summed over all processes; for a rollout, the number of completions of
            a step.
        longest: number of tokens of the longest row.
        trained: True if the role takes optimizer steps.
        device: torch device type of the run.
        card: memory of one device in bytes; None if unknown.
        takes_turns: `ProcessContext.takes_turns` of its processes.
        borrows: True if the role may serve the trainer's own tensors (capability `lent_weights`).
    """

    shape: ModelShape
    head: Literal["causal_lm", "value"] = "causal_lm"
    itemsize: int
    processes: int
    rows: int
    longest: int
    trained: bool
    device: Device
    card: int | None = None
    takes_turns: bool = False
    borrows: bool = False

    @property
    def logits(self) -> int:
        """Number of outputs of the head for each token."""
        return self.shape.vocabulary if self.head == "causal_lm" else 1

    def tokens(self, budget: int, shares: int) -> int:
        """Return the maximum number of padded tokens of one forward pass.

        Args:
            budget: the engine's `tokens_per_microbatch`.
            shares: number of ranks, or groups of ranks, that get different rows.
        """
        return min(max(budget, self.longest), -(-self.rows // shares) * self.longest)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryUse:
    """Bytes of each rank by purpose, such as `{"weights": ...}`.

    Attributes:
        held: bytes kept between calls, while awake or not offloaded. `"weights"` stay during a weight update too.
        working: maximum number of additional bytes while the engine computes.
        updating: additional bytes beside the weights during a weight update.
        asleep: bytes on a GPU while other roles take their turn on it, without `PROCESS_BYTES`.
        host: bytes on the host of a GPU, at all times.
        limit: maximum of the sum of `held` and `working`, which the engine does not exceed; None if there is none.
        note: a remark on an amount, such as the number of tokens that a cache holds.
        measured: True if the arithmetic was compared with real allocations.
    """

    held: Mapping[str, int]
    working: Mapping[str, int] = field(default_factory=dict)
    updating: Mapping[str, int] = field(default_factory=dict)
    asleep: int = 0
    host: int = 0
    limit: int | None = None
    note: str = ""
    measured: bool = False


def server_memory(
    demand: MemoryDemand,
    *,
    split: int,
    running: int,
    share: float,
    cache_mib: int | None,
    cpu_cache_mib: int,
    process: int = 0,
    block_itemsize: int | None = None,
) -> MemoryUse:
    """Return the memory of one process of an inference server that fills a fixed fraction of a GPU: with the weights,
    and with a cache in the rest of this fraction.

    Args:
        demand: the work that the engine will do.
        split: number of processes that the model is split over.
        running: maximum number of completions at once.
        share: fraction of a GPU's memory that the engine fills.
        cache_mib: MiB of keys and values on each GPU, instead of the rest of the share.
        cpu_cache_mib: MiB of keys and values on a CPU.
        process: `PROCESS_BYTES` if the engine counts them in its share, else 0.
        block_itemsize: bytes per element of the weights of blocks; None: `demand.itemsize`, as of all other weights.
    """
    shape, size = demand.shape, demand.itemsize
    weights = (size * shape.root_parameters + (block_itemsize or size) * shape.layers * shape.block_parameters) // split
    passing = size * PREFILL_TOKENS * (2 * shape.feed_forward + 4 * shape.hidden) // split
    passing += 4 * min(running, -(-demand.rows // demand.processes)) * shape.vocabulary
    bytes_per_token = -(-shape.cached_per_token * size // split)
    limit = int(share * demand.card) - process if demand.card and demand.device == "cuda" else None
    mib = cache_mib if cache_mib or demand.device == "cuda" else cpu_cache_mib
    cache, note = demand.longest * bytes_per_token, "KV cache of all the remaining GPU memory"
    if mib is not None:
        cache = mib * 2**20
    elif limit is not None:
        cache = max(cache, limit - weights - passing)
    if mib is not None or limit is not None:
        note = f"KV cache of {cache // bytes_per_token:,} tokens"
    return MemoryUse(
        held={"weights": weights, "KV cache": cache},
        working={"activations": passing},
        asleep=SERVER_ASLEEP_BYTES,
        limit=limit,
        note=note,
    )


PROCESS_BYTES = 3 * 2**29
"""Bytes that a process takes on a GPU before any allocation: CUDA's context and libraries, and NCCL. A guess."""

SERVER_ASLEEP_BYTES = 2 * 2**30
"""Bytes that an inference server (`server_memory`) keeps on a GPU while it sleeps: CUDA graphs, workspaces, collective
buffers. A guess."""

MARGIN = 0.04
"""Fraction of a GPU that a plan leaves free for allocator losses and the driver."""

PREFILL_TOKENS = 8192
"""Approximate number of tokens that an inference server (`server_memory`) computes in one pass."""
