"""The protocol of a rollout engine: one object per replica, asynchronous, tokens in and tokens out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from enginehouse.engines.model import ModelSpec, ProcessContext
    from enginehouse.engines.weights import WeightChunk, WeightState, WeightUpdate

from enginehouse.engines.train import ALL

FinishReason = Literal["stop", "length", "abort"]
PauseMode = Literal["abort", "wait", "keep"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to draw completions.

    Attributes:
        max_tokens: most tokens to generate for each completion; 0 scores the prompt only.
        n: completions of the prompt.
        temperature: logits are divided by it; 0 is greedy.
        top_p: keep the smallest set of tokens whose probability reaches it; 1 keeps all.
        top_k: keep the most likely `top_k` tokens; 0 keeps all.
        stop_token_ids: tokens that end a completion, besides the model's end-of-sequence token(s). The stop token
            is the last token of the completion.
        stop: strings that end a completion once its text holds one; its tokens are kept.
        ignore_eos: go on after the model's end-of-sequence token.
        seed: same seed, same weights, same engine: same completions, whatever else runs beside, but for what rounding
            turns (matrix products of another batch size). None draws afresh.
        prompt_logprobs: also score the prompt's tokens.
    """

    max_tokens: int = 16
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    prompt_logprobs: bool = False


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One prompt, as token ids, and how to continue it."""

    id: str
    prompt_ids: Sequence[int]
    sampling: SamplingParams = SamplingParams()


@dataclass(frozen=True, slots=True)
class Completion:
    """One completion of a prompt.

    Attributes:
        token_ids: generated tokens, the stop token included.
        logprobs: log-probability of each of them under the distribution `logits / temperature` over the whole
            vocabulary, before top-k and top-p (what a trainer computes); same length. Greedy uses temperature 1.
        finish_reason: `"stop"`, `"length"`, or `"abort"` (then what had been generated is kept).
        first_version: weight version the first token was drawn from.
        last_version: weight version the last token was drawn from; differs only after `pause("keep")`.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: FinishReason
    first_version: int
    last_version: int


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """What came of a request.

    Attributes:
        id: the request's id.
        completions: `n` of them, in sample order.
        prompt_logprobs: if asked for: logprob of each prompt token given those before it, the first 0.
    """

    id: str
    completions: Sequence[Completion]
    prompt_logprobs: Sequence[float] | None = None


@dataclass(frozen=True, slots=True)
class Endpoint:
    """How a launched replica can be reached and what it is.

    Attributes:
        engine: name and version of the engine, for reports.
        url: base URL of an OpenAI-compatible server, where the engine offers one.
        max_model_tokens: longest sequence, prompt and completion together.
    """

    engine: str
    url: str | None = None
    max_model_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Health:
    """A replica's answer to `health`: it answered, so it lives.

    Attributes:
        running: completions being generated.
        waiting: requests not begun.
        paused: whether `pause` holds it.
        version: weight version it serves.
        metrics: the engine's own figures, by name; each is logged as `rollout/NAME`, the mean over the replicas.
    """

    running: int
    waiting: int
    paused: bool
    version: int
    metrics: Mapping[str, float] = field(default_factory=dict)


@runtime_checkable
class RolloutEngine(Protocol):
    """One inference backend's replica. Every method is awaited on one event loop; none may block it.

    A weight update is `pause`, `start_weight_update`, `update_weights` for each chunk, `finish_weight_update` and
    `resume`. What is served is verified after the `resume`, as a paused engine need not score prompts; so what waited
    inside the engine goes on before. `generate` may answer it at once: its caller in the worker hands nothing out that
    was drawn from a version before that version was verified (`first_version` to `last_version`), and asks again where
    it never is.
    """

    async def launch(self, model: ModelSpec, options: Any, context: ProcessContext) -> Endpoint:
        """Load the model and be ready to generate, serving weight version 0.

        Raises:
            ModelError: the model cannot be loaded by this engine: it is not there, or lacks a parameter.
        """
        ...

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate; many calls run at once, and are batched continuously.

        A request is taken up while others run, and ends by itself: a short one that came later is answered before a
        long one that runs. An engine that answers batch by batch can neither abort nor pause in time. An aborted
        request returns what it had. A prompt is taken as the ids it is, special tokens too.

        Raises:
            EnginehouseError: this request cannot be served, which costs the others nothing: an empty prompt, a token id
                that is negative or beyond the vocabulary, `n` below 1, a negative temperature, `top_p` of 0 or less, a
                capability that is not declared, prompt and `max_tokens` together longer than the engine takes; or the
                engine was shut down, or its processes died.
        """
        ...

    async def abort(self, ids: Sequence[str] | None = None) -> None:
        """End requests by id, or all of them, running or waiting; others go on, and ids of no request are passed over.

        Their `generate` returns the tokens they had, with finish reason `"abort"`.
        """
        ...

    async def pause(self, mode: PauseMode = "abort") -> None:
        """Stop generating and return once nothing is running.

        `"abort"` ends running requests with what they have, `"wait"` lets them finish, `"keep"` freezes them where
        they are to go on after `resume`. Requests that arrive while paused wait.
        """
        ...

    async def resume(self) -> None:
        """Go on after `pause`."""
        ...

    async def sleep(self, tags: tuple[str, ...] = ALL) -> None:
        """Free accelerator memory: `"weights"`, `"kv_cache"`. Only with capability `sleep`.

        Until all is awake `generate` raises; `health` answers. With `"weights"` what was served is gone: `weight_state`
        has no version, and `generate` raises, until an update has brought weights again. What sleeps already goes on.

        Raises:
            EnginehouseError: a request is under way, or there is no such part.
        """
        ...

    async def wake_up(self, tags: tuple[str, ...] = ALL) -> None:
        """Take the memory back; nothing to do for what is awake. An update needs the weights awake, not the cache."""
        ...

    async def start_weight_update(self, update: WeightUpdate) -> None:
        """Be ready to stage a new version while paused; the old one is untouched until `finish_weight_update`."""
        ...

    async def update_weights(self, chunk: WeightChunk) -> None:
        """Stage some parameters. The chunk's tensors are valid only during the call, unless its `memory` is held.

        Raises:
            WeightSyncError: unknown name, wrong shape or dtype.
        """
        ...

    async def finish_weight_update(self, version: int) -> None:
        """Serve what was staged as `version`, dropping every cache computed from older weights.

        Raises:
            WeightSyncError: a parameter is missing; the old version keeps serving.
        """
        ...

    async def abort_weight_update(self) -> None:
        """Throw away what was staged; the old version keeps serving."""
        ...

    async def weight_state(self) -> WeightState:
        """Report the version being served and the checksum of each parameter as it is served."""
        ...

    async def health(self) -> Health:
        """Answer promptly if alive."""
        ...

    async def shutdown(self) -> None:
        """Release everything: end each process that was started, and answer what runs, with an error or what it had.

        A `generate` that comes later raises an `EnginehouseError`.
        """
        ...
