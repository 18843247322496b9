"""Declare the engines in plain PyTorch to enginehouse. Light: only their workers import the engines."""

from __future__ import annotations

from enginehouse.plugin import Layout, RolloutBackend, TrainBackend, hookimpl
from enginehouse.plugin.capabilities import (
    COLOCATES,
    DEVICE_CHECKSUMS,
    EXPERTS,
    HALF_PRECISION,
    LENT_WEIGHTS,
    OFFLOAD,
    PAUSE_KEEP,
    PAUSE_KEEP_CACHE,
    PROMPT_LOGPROBS,
    RESHARD_CHECKPOINT,
    SEED,
    SLEEP,
    STAGES_WHILE_GENERATING,
    STOP_STRINGS,
    VALUE_HEAD,
    WEIGHT_CHECKSUMS,
)  # fmt: skip

enginehouse_protocol = "1.1"


@hookimpl
def enginehouse_register_backends(register):
    register(
        TrainBackend(
            name="torch",
            summary="Plain PyTorch, data parallel: any Hugging Face causal LM, on CPU or GPU",
            engine="enginehouse_torch.train:TorchTrainEngine",
            options="enginehouse_torch.options:TorchTrainOptions",
            capabilities={EXPERTS, VALUE_HEAD, RESHARD_CHECKPOINT, HALF_PRECISION, OFFLOAD, LENT_WEIGHTS},
            layouts=(Layout("single"), Layout("dp2", 2), Layout("dp4", 4)),
        )
    )
    register(
        RolloutBackend(
            name="torch",
            summary="Batched decoding on the model's own forward with a key-value cache, on CPU or GPU",
            engine="enginehouse_torch.rollout:TorchRolloutEngine",
            options="enginehouse_torch.options:TorchRolloutOptions",
            capabilities={
                STOP_STRINGS,
                SEED,
                PROMPT_LOGPROBS,
                PAUSE_KEEP,
                PAUSE_KEEP_CACHE,
                WEIGHT_CHECKSUMS,
                DEVICE_CHECKSUMS,
                COLOCATES,
                EXPERTS,
                SLEEP,
                STAGES_WHILE_GENERATING,
                LENT_WEIGHTS,
            },
        )
    )
