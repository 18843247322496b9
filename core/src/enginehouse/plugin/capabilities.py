"""Names of what a backend can do beyond the protocol's minimum. What is not declared is never used or tested."""

from __future__ import annotations

__all__ = [
    "BACKGROUND_SAVE",
    "COLOCATES",
    "CROSS_HOST",
    "EXPERTS",
    "HALF_PRECISION",
    "LORA",
    "OFFLOAD",
    "OPENAI_ENDPOINT",
    "PAUSE_KEEP",
    "PROMPT_LOGPROBS",
    "RESHARD_CHECKPOINT",
    "SAME_HOST",
    "SAME_PROCESS",
    "SEED",
    "SLEEP",
    "STOP_STRINGS",
    "VALUE_HEAD",
    "WEIGHT_CHECKSUMS",
]

# Training and rollout engines
EXPERTS = "experts"
"""Trains mixtures of experts; serves them, and updates their weights."""

# Training engines
OFFLOAD = "offload"
"""`offload` and `onload` move state to host memory and back."""
LORA = "lora"
"""The option `lora` (`LoraOptions`) trains low-rank adapters instead of the whole model; `forward_base` and
`export_adapter` work."""
VALUE_HEAD = "value_head"
"""`ModelSpec.head == "value"` works."""
RESHARD_CHECKPOINT = "reshard_checkpoint"
"""`load` accepts a checkpoint written with another number of ranks."""
BACKGROUND_SAVE = "background_save"
"""`save_in_background` writes while training goes on."""
HALF_PRECISION = "half_precision"
"""`ModelSpec.dtype` may be `"bfloat16"`: computes in it, updates in float32, serves in it."""

# Rollout engines
STOP_STRINGS = "stop_strings"
"""`SamplingParams.stop` works."""
SEED = "seed"
"""`SamplingParams.seed` makes completions repeatable whatever else runs beside them."""
PROMPT_LOGPROBS = "prompt_logprobs"
"""`SamplingParams.prompt_logprobs` works (needed for the effect check of a weight update)."""
PAUSE_KEEP = "pause_keep"
"""`pause("keep")` works."""
SLEEP = "sleep"
"""`sleep` and `wake_up` free and take back accelerator memory."""
WEIGHT_CHECKSUMS = "weight_checksums"
"""`weight_state` reports checksums of the weights as served."""
COLOCATES = "colocates"
"""May live in a process with a training engine: it leaves threads, seeds and devices of the process as they are."""
OPENAI_ENDPOINT = "openai_endpoint"
"""`Endpoint.url` is an OpenAI-compatible server."""

# Transports
SAME_PROCESS = "same_process"
"""Moves weights between two roles of one process."""
SAME_HOST = "same_host"
"""Moves weights between processes of one host."""
CROSS_HOST = "cross_host"
"""Moves weights between hosts."""

OF: dict[str, frozenset[str]] = {
    "train": frozenset({BACKGROUND_SAVE, EXPERTS, HALF_PRECISION, LORA, OFFLOAD, RESHARD_CHECKPOINT, VALUE_HEAD}),
    "rollout": frozenset(
        {
            COLOCATES,
            EXPERTS,
            OPENAI_ENDPOINT,
            PAUSE_KEEP,
            PROMPT_LOGPROBS,
            SEED,
            SLEEP,
            STOP_STRINGS,
            WEIGHT_CHECKSUMS,
        }
    ),
    "transport": frozenset({SAME_PROCESS, SAME_HOST, CROSS_HOST}),
}
"""By kind of record those that it may declare; the conformance suite has a check of each."""
