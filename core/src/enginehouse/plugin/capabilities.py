"""Names of abilities beyond the minimum of a protocol. An undeclared ability is neither used nor tested."""

from __future__ import annotations

__all__ = [
    "ADAPTER_UPDATES",
    "BACKGROUND_SAVE",
    "COLOCATES",
    "CROSS_HOST",
    "DEVICE_CHECKSUMS",
    "EXPERTS",
    "HALF_PRECISION",
    "LENT_WEIGHTS",
    "LORA",
    "OFFLOAD",
    "OPENAI_ENDPOINT",
    "PAUSE_KEEP",
    "PAUSE_KEEP_CACHE",
    "PROMPT_LOGPROBS",
    "RESHARD_CHECKPOINT",
    "SAME_HOST",
    "SAME_PROCESS",
    "SEED",
    "SLEEP",
    "STAGES_WHILE_GENERATING",
    "STOP_STRINGS",
    "VALUE_HEAD",
    "WEIGHT_CHECKSUMS",
]

# Training and rollout engines
EXPERTS = "experts"
"""A training engine trains mixture-of-experts models. A rollout engine serves them and updates their weights."""
LENT_WEIGHTS = "lent_weights"
"""Training: `WeightSource.iter_full` yields the tensors that are trained, not copies, and their addresses never change.
Rollout: the engine serves lent tensors in place, within `Loan.using` (`WeightChunk.loan`)."""

ADAPTER_UPDATES = "adapter_updates"
"""A weight update may bring an adapter alone. Training: `adapter_source` works, with the option `lora`. Rollout: the
engine adds the adapter `ModelSpec.adapter` to the model that it has loaded. Since 1.1."""

# Training engines
OFFLOAD = "offload"
"""`offload` and `onload` move the state to host memory and back."""
LORA = "lora"
"""With the option `lora` (`LoraOptions`), the engine trains only low-rank adapters. `forward_base` and `export_adapter`
work."""
VALUE_HEAD = "value_head"
"""`ModelSpec.head == "value"` works."""
RESHARD_CHECKPOINT = "reshard_checkpoint"
"""`load` accepts a checkpoint written with another number of ranks."""
BACKGROUND_SAVE = "background_save"
"""`save_in_background` writes while training continues."""
HALF_PRECISION = "half_precision"
"""`ModelSpec.dtype` may be `"bfloat16"`: the engine computes and serves in bfloat16, and updates weights in float32."""

# Rollout engines
STOP_STRINGS = "stop_strings"
"""`SamplingParams.stop` works."""
SEED = "seed"
"""`SamplingParams.seed` makes completions repeatable, whatever other requests run."""
PROMPT_LOGPROBS = "prompt_logprobs"
"""`SamplingParams.prompt_logprobs` works. The effect check of a weight update needs it."""
PAUSE_KEEP = "pause_keep"
"""`pause("keep")` works."""
PAUSE_KEEP_CACHE = "pause_keep_cache"
"""`pause("keep_cache")` works. Since 1.1."""
STAGES_WHILE_GENERATING = "stages_while_generating"
"""`start_weight_update`, `update_weights` and `abort_weight_update` work while the engine generates, and change nothing
that it computes. The engine is then paused only for `finish_weight_update`. Since 1.1."""
SLEEP = "sleep"
"""`sleep` frees accelerator memory, and `wake_up` allocates it again."""
WEIGHT_CHECKSUMS = "weight_checksums"
"""`weight_state` reports checksums of the served weights."""
DEVICE_CHECKSUMS = "device_checksums"
"""If a chunk has a `mixed_checksum` of a parameter, `weight_state` reports the parameter's `mixed_checksum`
(`checksum_like`), so that no weight leaves the device to be read back. Since 1.1."""
COLOCATES = "colocates"
"""The engine may share a process with a training engine. It does not change the process's threads, seeds or devices."""
OPENAI_ENDPOINT = "openai_endpoint"
"""`Endpoint.url` is an OpenAI-compatible server."""

# Transports
SAME_PROCESS = "same_process"
"""Moves weights between two roles of one process."""
SAME_HOST = "same_host"
"""Moves weights between processes of one host."""
CROSS_HOST = "cross_host"
"""Moves weights between hosts."""

BY_KIND: dict[str, frozenset[str]] = {
    "train": frozenset({
        ADAPTER_UPDATES, BACKGROUND_SAVE, EXPERTS, HALF_PRECISION, LENT_WEIGHTS, LORA, OFFLOAD, RESHARD_CHECKPOINT,
        VALUE_HEAD,
    }),
    "rollout": frozenset({
        ADAPTER_UPDATES, COLOCATES, DEVICE_CHECKSUMS, EXPERTS, LENT_WEIGHTS, OPENAI_ENDPOINT, PAUSE_KEEP,
        PAUSE_KEEP_CACHE, PROMPT_LOGPROBS, SEED, SLEEP, STAGES_WHILE_GENERATING, STOP_STRINGS, WEIGHT_CHECKSUMS,
    }),
    "transport": frozenset({SAME_PROCESS, SAME_HOST, CROSS_HOST}),
}  # fmt: skip
"""Capabilities that each kind of record may declare. The conformance suite checks every one."""
