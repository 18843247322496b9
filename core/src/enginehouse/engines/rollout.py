"""The protocol of a rollout engine: one asynchronous object per replica. Tokens in, tokens out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from enginehouse.engines.model import ModelSpec, ProcessContext
    from enginehouse.engines.weights import WeightChunk, WeightState, WeightUpdate

from enginehouse.engines.train import ALL

FinishReason = Literal["stop", "length", "abort"]
PauseMode = Literal["abort", "wait", "keep", "keep_cache"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters for sampling completions.

    Attributes:
        max_tokens: maximum number of tokens per completion; 0 only scores the prompt.
        n: number of completions of the prompt.
        temperature: divisor of the logits; 0 is greedy.
        top_p: sample from the smallest set of tokens whose total probability is at least `top_p`; 1 keeps all.
        top_k: sample from the `top_k` most likely tokens; 0 keeps all.
        stop_token_ids: tokens that end a completion, besides the model's end-of-sequence tokens. The completion keeps
            the stop token as its last token.
        stop: strings that end a completion once its text contains one. The completion keeps their tokens.
        ignore_eos: continue after the model's end-of-sequence token.
        seed: equal seed, weights and engine give equal completions, whatever other requests run, up to rounding that
            depends on the batch size. None: a new seed each time.
        prompt_logprobs: also score the tokens of the prompt.
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
    """One prompt, as token ids, with its sampling parameters."""

    id: str
    prompt_ids: Sequence[int]
    sampling: SamplingParams = SamplingParams()


@dataclass(frozen=True, slots=True)
class Completion:
    """One completion of a prompt.

    Attributes:
        token_ids: the generated tokens, the stop token included.
        logprobs: log-probability of each token, in nats, under `logits / temperature` over the whole vocabulary, before
            top-k and top-p. A trainer computes the same. Greedy sampling uses temperature 1.
        finish_reason: `"stop"`, `"length"`, or `"abort"`, which keeps the tokens generated so far.
        first_version: weight version that sampled the first token. After `pause("keep_cache")` an older version, if the
            request may have used its keys and values.
        last_version: weight version that sampled the last token. It differs from `first_version` only after
            `pause("keep")` or `pause("keep_cache")`.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: FinishReason
    first_version: int
    last_version: int


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """The result of a request.

    Attributes:
        id: id of the request.
        completions: `n` completions in sample order.
        prompt_logprobs: if requested, the logprob of each prompt token given those before it; 0 for the first.
    """

    id: str
    completions: Sequence[Completion]
    prompt_logprobs: Sequence[float] | None = None


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address and properties of a launched replica.

    Attributes:
        engine: name and version of the engine, for reports.
        url: base URL of an OpenAI-compatible server, if the engine offers one.
        max_model_tokens: maximum number of tokens of a sequence, prompt and completion together.
    """

    engine: str
    url: str | None = None
    max_model_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Health:
    """The answer of a replica to `health`.

    Attributes:
        running: number of completions being generated.
        waiting: number of requests that have not begun.
        paused: True while the engine is paused.
        version: weight version that the engine serves.
        metrics: the engine's own metrics by name. Each is logged as `rollout/NAME`, averaged over the replicas.
        running_tokens: number of tokens of the completions being generated, each with its prompt, in the engine's last
            steps. None: unknown. Since 1.1.
    """

    running: int
    waiting: int
    paused: bool
    version: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    running_tokens: int | None = None


@runtime_checkable
class RolloutEngine(Protocol):
    """One replica of an inference engine. All methods are awaited on one event loop, and none may block it.

    A weight update is `pause`, `start_weight_update`, `update_weights` for each chunk, `finish_weight_update` and
    `resume`. With the capability `stages_while_generating`, `pause` comes only before `finish_weight_update`.

    The served weights are verified after `resume`, because a paused engine need not score prompts. Waiting requests
    therefore continue before the verification, and `generate` may answer them at once. The worker returns a completion
    only once its versions (`first_version` to `last_version`) are verified. If one of these versions is never verified,
    the worker repeats the request.
    """

    async def launch(self, model: ModelSpec, options: Any, context: ProcessContext) -> Endpoint:
        """Load the model and prepare to generate with weight version 0.

        Raises:
            ModelError: if this engine cannot load the model, because it is missing or lacks a parameter.
        """
        ...

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate completions. Many calls run at once and are batched continuously.

        A request starts while others run and ends by itself, so a short one may finish before an earlier long one. An
        engine that returns whole batches could neither abort nor pause in time. An aborted request returns the tokens
        it had. The prompt's ids are used unchanged, special tokens included.

        Raises:
            EnginehouseError: if this request cannot be served; the others are not affected. Reasons are an empty
                prompt, a token id outside the vocabulary, `n` below 1, a negative temperature, `top_p` of 0 or less, an
                undeclared capability, a prompt and `max_tokens` that exceed the engine's limit together, or an engine
                that was shut down or whose processes died.
        """
        ...

    async def abort(self, ids: Sequence[str] | None = None) -> None:
        """End the requests `ids`, or all running and waiting requests. Other requests continue, and unknown ids are
        ignored.

        Their `generate` returns the tokens so far, with finish reason `"abort"`.
        """
        ...

    async def pause(self, mode: PauseMode = "abort") -> None:
        """Stop generating. Return once nothing is running.

        `"abort"` ends running requests with the tokens they have, `"wait"` lets them finish, and `"keep"` and
        `"keep_cache"` freeze them until `resume`. If the weights change meanwhile, `"keep"` computes their keys and
        values again from the new weights. `"keep_cache"` lets them continue with the old ones, which no request reads
        that arrives after the pause. Requests that arrive while paused wait.

        Raises:
            EnginehouseError: if the engine does not declare the capability of the mode, or cannot keep its cache now,
                for instance because other clients use it.
        """
        ...

    async def resume(self) -> None:
        """Continue after `pause`."""
        ...

    async def sleep(self, tags: tuple[str, ...] = ALL) -> None:
        """Free the accelerator memory of `"weights"` and `"kv_cache"`. Requires the capability `sleep`.

        Until both are awake, `generate` raises and `health` still answers. Sleeping `"weights"` are lost:
        `weight_state` has no version, and `generate` raises, until an update brings weights again. A part that sleeps
        already stays asleep.

        Raises:
            EnginehouseError: if a request is running or waiting, or a tag is unknown.
        """
        ...

    async def wake_up(self, tags: tuple[str, ...] = ALL) -> None:
        """Allocate the memory again. Parts that are awake do not change. A weight update requires only `"weights"` to
        be awake."""
        ...

    async def start_weight_update(self, update: WeightUpdate) -> None:
        """Prepare to stage a new version. The old version stays intact until `finish_weight_update`. The engine is
        paused, unless it declares `stages_while_generating`."""
        ...

    async def update_weights(self, chunk: WeightChunk) -> None:
        """Stage some parameters. The tensors of a chunk are valid only during the call, unless its `memory` is held.

        Raises:
            WeightSyncError: if a name is unknown, or a shape or dtype is wrong.
        """
        ...

    async def finish_weight_update(self, version: int) -> None:
        """Serve the staged parameters as `version`, and drop every cache computed from older weights, except what
        `pause("keep_cache")` keeps.

        Raises:
            WeightSyncError: if a parameter is missing. The old version is still served.
        """
        ...

    async def abort_weight_update(self) -> None:
        """Discard the staged parameters. The old version is still served."""
        ...

    async def weight_state(self) -> WeightState:
        """Return the served version and the checksum of each parameter as it is served."""
        ...

    async def health(self) -> Health:
        """Answer promptly if alive."""
        ...

    async def shutdown(self) -> None:
        """End all started processes, and answer running requests with an error or their tokens so far.

        A later `generate` raises an `EnginehouseError`.
        """
        ...
