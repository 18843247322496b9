"""Descriptions of a model and of a worker process, which an engine gets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from enginehouse.engines.options import LoraOptions

Device = Literal["cpu", "cuda"]
"""A torch device type."""

NO_FLOAT16 = (
    "no engine trains in float16: the gradients of a sum over tokens overflow, because no engine scales the loss; use "
    "bfloat16"
)
"""Reason why a training engine rejects `ModelSpec.dtype="float16"`."""

TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken")
"""Glob patterns of tokenizer files. A model directory with a match has a tokenizer."""

STRETCHING = ("yarn", "linear", "dynamic")
"""Types of RoPE scaling for which `max_position_embeddings` may be the length before scaling by the factor."""

LONGROPE = ("longrope", "su")
"""Names of the RoPE scaling with separate frequencies for short rows and long rows."""


def positions(model: Mapping[str, Any]) -> int | None:
    """Return the number of token positions of a model from its `config.json`; None if unknown."""
    text, scaling = _text_and_scaling(model)
    number, factor = text.get("max_position_embeddings"), scaling.get("factor")
    if not isinstance(number, int):
        return None
    if _rope_type(scaling) in STRETCHING and isinstance(factor, int | float):
        return max(number, int(scaling.get("original_max_position_embeddings", number) * factor))
    return number


def served_positions(model: Mapping[str, Any]) -> int | None:
    """Return the maximum row length, in tokens, up to which all engines compute the same logprobs; None if unknown.

    The length is computed from the model's `config.json`. It is `positions`, except for RoPE types whose frequencies
    change once a row exceeds the original length. In such a longer row, a token's logprob depends on the final length
    of the row. Engines also choose the frequencies differently: vLLM uses the maximum row length that it is started
    with, and for `longrope` it rejects rows beyond the original length.
    """
    text, scaling = _text_and_scaling(model)
    number = positions(model)
    by_layer = [rope for rope in scaling.values() if isinstance(rope, Mapping)]
    for rope in by_layer or [scaling]:
        original: Any = None
        if _rope_type(rope) == "dynamic":
            original = text.get("max_position_embeddings")
        elif _rope_type(rope) in LONGROPE:
            key = "original_max_position_embeddings"
            original = rope.get(key) or text.get(key)
        if isinstance(original, int):
            number = original if number is None else min(number, original)
    return number


def _text_and_scaling(model: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the decoder's part of a `config.json`, and its RoPE scaling."""
    text = model.get("text_config") or model
    return text, text.get("rope_scaling") or text.get("rope_parameters") or {}


def _rope_type(scaling: Mapping[str, Any]) -> Any:
    return scaling.get("rope_type", scaling.get("type"))


def end_ids(*configured: int | Iterable[int] | None) -> tuple[int, ...]:
    """Return the first argument that is not None, as a tuple of end-of-sequence token ids. Pass the token ids of the
    generation config first."""
    for ends in configured:
        if ends is not None:
            return (ends,) if isinstance(ends, int) else tuple(ends)
    return ()


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A Hugging Face model: its place, and how to load it.

    Attributes:
        path: a directory with `config.json`, weights in safetensors and, for text, a tokenizer.
        dtype: dtype of the parameters: `"float32"`, `"bfloat16"` or, for rollout engines only, `"float16"`.
        head: the head on the decoder. `"causal_lm"` gives logprobs; `"value"` gives one scalar per token.
        trust_remote_code: passed to transformers.
        seed: seed for weights that the checkpoint does not hold, such as new adapters.
        adapter: for rollout engines with the capability `adapter_updates`: the adapter that weight updates bring. The
            engine adds it to the weights of `path`, which never change. None: updates bring all weights. Since 1.1.
    """

    path: str
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    head: Literal["causal_lm", "value"] = "causal_lm"
    trust_remote_code: bool = False
    seed: int = 0
    adapter: LoraOptions | None = field(default=None, hash=False)  # its list of targets has no hash


@dataclass(frozen=True, slots=True)
class ProcessContext:
    """The place of a worker process in its group.

    `torch.distributed.init_process_group()` works without arguments in a worker: `RANK`, `WORLD_SIZE`, `LOCAL_RANK`,
    `MASTER_ADDR` and `MASTER_PORT` are set, and the store already listens on rank 0.

    Attributes:
        role: name of the role for messages, such as `"actor"` or `"rollout"`.
        rank: number of this process in its group, in `range(world_size)`.
        world_size: number of processes in the group.
        local_rank: number of this process among the processes of its group on the same node.
        node: address at which other nodes reach this node.
        device: torch device type, `"cpu"` or `"cuda"`. A CUDA process uses device `local_rank` of its visible devices,
            or the only visible one.
        seed: base seed of the run. An engine derives its own seed from this seed and its rank.
        takes_turns: True if other processes take turns with this process on the same devices. The engine must then be
            able to `sleep`, even if that requires special arguments at its start.
        labels: further values from the launcher. `"replica"` is the number of a rollout replica in the run.
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
