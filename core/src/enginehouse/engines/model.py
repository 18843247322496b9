"""What an engine is told about the model it runs and about the process it runs in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Device = Literal["cpu", "cuda"]
"""A torch device type."""

NO_FLOAT16 = (
    "no engine trains in float16: gradients of a loss that sums over tokens go beyond it, and no loss is scaled; use "
    "bfloat16"
)
"""Why a training engine refuses `ModelSpec.dtype="float16"`."""

TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken")
"""Glob patterns of files in a model directory; one of them there means that it has a tokenizer."""


STRETCHING = ("yarn", "linear", "dynamic")
"""Types of RoPE scaling whose factor `max_position_embeddings` need not have in it."""


LONGROPE = ("longrope", "su")
"""Names of the type of RoPE scaling that has frequencies for short rows and others for long ones."""


def positions(model: Mapping[str, Any]) -> int | None:
    """How many tokens a model, given its `config.json`, has positions for; None where that is not known."""
    text = model.get("text_config") or model
    number = text.get("max_position_embeddings")
    scaling = text.get("rope_scaling") or text.get("rope_parameters") or {}
    kind, factor = scaling.get("rope_type", scaling.get("type")), scaling.get("factor")
    if not isinstance(number, int):
        return None
    if kind in STRETCHING and isinstance(factor, int | float):
        return max(number, int(scaling.get("original_max_position_embeddings", number) * factor))
    return number


def served_positions(model: Mapping[str, Any]) -> int | None:
    """How long a row may be that engines sample and score alike, given a model's `config.json`; None: not known.

    It is `positions`, but for the kinds of RoPE whose frequencies change once a row is longer than the model was first
    made for. A token's logprob then depends on how long its row becomes, and runtimes choose the frequencies in ways of
    their own: vLLM by the longest row that it is started for, and for `longrope` it takes none longer by itself.
    """
    text = model.get("text_config") or model
    number = positions(model)
    scaling = text.get("rope_scaling") or text.get("rope_parameters") or {}
    by_layer = [rope for rope in scaling.values() if isinstance(rope, Mapping)]
    for rope in by_layer or [scaling]:
        first: Any = None
        kind = rope.get("rope_type", rope.get("type"))
        if kind == "dynamic":
            first = text.get("max_position_embeddings")
        elif kind in LONGROPE:
            named = "original_max_position_embeddings"
            first = rope.get(named) or text.get(named)
        if isinstance(first, int):
            number = first if number is None else min(number, first)
    return number


def end_ids(*configured: int | Iterable[int] | None) -> tuple[int, ...]:
    """A model's end-of-sequence tokens: those of the first that names any, its generation config before its config."""
    for ends in configured:
        if ends is not None:
            return (ends,) if isinstance(ends, int) else tuple(ends)
    return ()


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A Hugging Face model, by where it is and how it is to be loaded.

    Attributes:
        path: a directory with `config.json`, weights in safetensors and, for text, a tokenizer.
        dtype: dtype of the parameters: `"float32"`, `"bfloat16"` or, of rollout engines alone, `"float16"`.
        head: what stands on top of the decoder: `"causal_lm"` gives logprobs, `"value"` one scalar a token.
        trust_remote_code: passed to transformers.
        seed: seeds what the checkpoint does not hold (fresh adapters).
    """

    path: str
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    head: Literal["causal_lm", "value"] = "causal_lm"
    trust_remote_code: bool = False
    seed: int = 0


@dataclass(frozen=True, slots=True)
class ProcessContext:
    """Where a worker process stands in its group.

    `torch.distributed.init_process_group()` works without arguments in a worker: `RANK`, `WORLD_SIZE`,
    `LOCAL_RANK`, `MASTER_ADDR` and `MASTER_PORT` are set, and the store already listens on rank 0.

    Attributes:
        role: name of the role, for messages: `"actor"`, `"rollout"`, ...
        rank: this process's number in its group, in `range(world_size)`.
        world_size: number of processes in the group.
        local_rank: this process's number among those of its group on the same node.
        node: address of the node, as other nodes know it.
        device: torch device type for this process, `"cpu"` or `"cuda"`; a CUDA process uses device `local_rank`
            of what is visible to it unless exactly one device is visible.
        seed: base seed of the run; an engine derives its own from it and its rank.
        takes_turns: whether others have the devices in turns with this process: an engine that has to be started in
            another way to be able to `sleep` is started so.
        labels: anything else a launcher wants to say; `"replica"` is a rollout replica's number among all of the run.
    """

    role: str
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    node: str = "localhost"
    device: Device = "cpu"
    seed: int = 0
    labels: Mapping[str, Any] = field(default_factory=dict)
    takes_turns: bool = False

    def __str__(self) -> str:
        return f"{self.role} rank {self.rank}/{self.world_size} on {self.node}"
