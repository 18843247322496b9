"""The `torch` rollout engine: batched decoding of any Hugging Face causal language model in plain PyTorch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import torch

from enginehouse.engines.model import ModelSpec, ProcessContext, end_ids, served_positions
from enginehouse.engines.rollout import Endpoint, GenerateRequest, GenerateResult, Health, PauseMode
from enginehouse.engines.sleep import check_awake, check_weights_awake, sleeping
from enginehouse.engines.storages import give_back_freed_memory
from enginehouse.engines.train import ALL
from enginehouse.engines.weights import WeightChunk, WeightState, WeightUpdate
from enginehouse.errors import EnginehouseError, ModelError
from enginehouse_torch.decode_loop import DecodeLoop, RolloutEngineFailed
from enginehouse_torch.forward import choose_forward
from enginehouse_torch.modeling.loading import load_model
from enginehouse_torch.modeling.memory import keep_freed_memory
from enginehouse_torch.modeling.ranks import device_of
from enginehouse_torch.options import TorchRolloutOptions
from enginehouse_torch.requests import RequestProgress
from enginehouse_torch.running_batch import RunningBatch
from enginehouse_torch.served_weights import ServedWeights

SHUTDOWN_SECONDS = 30.0


class TorchRolloutEngine:
    """Implements `enginehouse.engines.rollout.RolloutEngine`, whose docstrings are the contract.

    In addition to the contract:

    * Requests submitted in one turn of the event loop (one `asyncio.gather`) are admitted together. A request that
      arrives while others run joins them at the next token boundary if `max_running` leaves room for all its samples.
      Requests begin in order of arrival.
    * The same seed gives the same tokens whatever else runs, up to rounding. Matrix products of another batch size may
      differ in the last bit, which changes a token only if the random number falls on that bit.
    * An exception while decoding stops the engine. Unfinished requests and every later call raise
      `RolloutEngineFailed`, `health` included.

    Attributes:
        forward_name: class of the forward pass in use, once launched.
    """

    def __init__(self) -> None:
        self._loop: DecodeLoop | None = None
        self._arrivals: list[tuple[RequestProgress, asyncio.Future[GenerateResult]]] = []
        self.forward_name = ""
        self._asleep: frozenset[str] = frozenset()
        self._text_of: Callable[[list[int]], str] | None = None

    @property
    def loop(self) -> DecodeLoop:
        """The decode loop.

        Raises:
            RolloutEngineFailed: the engine is not launched.
        """
        if self._loop is None:
            raise RolloutEngineFailed("the torch rollout engine is not launched")
        return self._loop

    async def launch(self, model: ModelSpec, options: TorchRolloutOptions, context: ProcessContext) -> Endpoint:
        """Load the model and start the decode thread.

        Raises:
            ModelError: the model cannot be loaded, has no language-model head, or has state other than keys and values.
        """
        if model.head != "causal_lm":
            raise ModelError(
                f"a rollout engine generates text; it cannot serve {model.path!r} with a {model.head!r} head"
            )
        return await asyncio.to_thread(self._launch, model, options, context)

    def _launch(self, spec: ModelSpec, options: TorchRolloutOptions, context: ProcessContext) -> Endpoint:
        keep_freed_memory()
        device = device_of(context)
        model = load_model(spec, device).requires_grad_(False)
        text = model.config.get_text_config()
        own_limit = served_positions(text.to_dict())
        limits = [limit for limit in (options.max_model_tokens, own_limit) if limit is not None]
        self._spec = spec
        self._vocabulary = text.vocab_size
        self._max_model_tokens = min(limits) if limits else None
        forward = choose_forward(model, own_limit or 2**31, options.fused)
        self.forward_name = type(forward).__name__
        self._weights = ServedWeights(model, spec.path, str(context), forward.rebind)
        configs = model.generation_config, model.config.get_text_config()
        ends = end_ids(*(getattr(config, "eos_token_id", None) for config in configs))
        batch = RunningBatch(forward, text.num_hidden_layers, device, text.vocab_size, ends, options.prefill_tokens)
        self._loop = DecodeLoop(batch, self._weights, options.max_running, str(context))
        if self._weights.are_large:
            self._loop.at_rest = give_back_freed_memory
        return Endpoint(engine=f"torch {torch.__version__}", max_model_tokens=self._max_model_tokens)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate the completions of a request. Cancelling the call aborts the request.

        Raises:
            EnginehouseError: the request is invalid, for instance because its prompt is too long.
            RolloutEngineFailed: the engine has failed.
        """
        loop = self.loop
        loop.check()
        pending = RequestProgress(request, self._vocabulary, self._max_model_tokens)
        if request.sampling.stop:
            pending.text_of = await self._tokenizer()
        check_awake(self._asleep, self._weights.is_lost)
        self._weights.check_loan()
        event_loop = asyncio.get_running_loop()
        future: asyncio.Future[GenerateResult] = event_loop.create_future()
        if not self._arrivals:
            # Tasks that are ready in this turn of the event loop add their requests before all are submitted.
            event_loop.call_soon(self._hand_over)
        self._arrivals.append((pending, future))
        try:
            return await future
        except asyncio.CancelledError:
            self._hand_over()
            loop.forget(pending)
            raise

    def _hand_over(self) -> None:
        arrivals, self._arrivals = self._arrivals, []
        if arrivals:
            self.loop.submit(arrivals)

    async def abort(self, ids: Sequence[str] | None = None) -> None:
        """Abort requests. Waiting requests end too, without tokens."""
        self._hand_over()
        await self.loop.abort(ids)

    async def pause(self, mode: PauseMode = "abort") -> None:
        self._hand_over()
        await self.loop.pause(mode)

    async def resume(self) -> None:
        await self.loop.resume()

    async def sleep(self, tags: tuple[str, ...] = ALL) -> None:
        """Free memory as the protocol says, and return the host's freed memory to the system."""
        self._hand_over()
        asleep = sleeping(tags)

        def free() -> None:
            if running := self.loop.running + self.loop.waiting:
                raise EnginehouseError(
                    f"the torch rollout engine cannot sleep while {running} requests are in progress"
                )
            if "weights" in asleep - self._asleep:
                self._weights.forget()
            self._asleep |= asleep
            give_back_freed_memory()

        await self.loop.call(free)

    async def wake_up(self, tags: tuple[str, ...] = ALL) -> None:
        awake = sleeping(tags)

        def take_back() -> None:
            if "weights" in awake & self._asleep:
                self._weights.make_room()
            self._asleep -= awake

        await self.loop.call(take_back)

    async def start_weight_update(self, update: WeightUpdate) -> None:
        """Begin to stage a version. Discard an update that was started and not finished.

        Raises:
            WeightSyncError: the version is not newer than the served one, or a parameter does not fit the model.
        """
        self.loop.check()
        check_weights_awake(self._asleep)
        self._weights.start(update)

    async def update_weights(self, chunk: WeightChunk) -> None:
        self.loop.check()
        await asyncio.to_thread(self._weights.stage, chunk)

    async def finish_weight_update(self, version: int) -> None:
        """Serve the staged version from the next token boundary on."""
        await self.loop.switch(version)

    async def abort_weight_update(self) -> None:
        self.loop.check()
        self._weights.discard()

    async def weight_state(self) -> WeightState:
        """Return version and checksums; checksums are computed once per version."""
        return await self.loop.call(self._weights.state)

    async def health(self) -> Health:
        """Return the state of the decode loop.

        Raises:
            RolloutEngineFailed: the decode loop has failed.
        """
        loop = self.loop
        loop.check()
        waiting, tokens = loop.waiting + len(self._arrivals), loop.running_tokens
        return Health(loop.running, waiting, loop.paused, self._weights.version, running_tokens=tokens)

    async def shutdown(self) -> None:
        """Stop the decode thread; running requests return as aborted.

        Raises:
            EnginehouseError: the thread did not stop within `SHUTDOWN_SECONDS`.
        """
        if self._loop is not None:
            self._hand_over()
            await asyncio.to_thread(self._loop.stop, SHUTDOWN_SECONDS)
            self._loop = None
            del self._weights

    async def _tokenizer(self) -> Callable[[list[int]], str]:
        """Load the tokenizer, once, for requests with stop strings."""
        if self._text_of is None:
            self._text_of = await asyncio.to_thread(_load_tokenizer, self._spec)
        return self._text_of


def _load_tokenizer(spec: ModelSpec) -> Callable[[list[int]], str]:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            spec.path, trust_remote_code=spec.trust_remote_code, local_files_only=True
        )
    except Exception as error:
        raise ModelError(
            f"stop strings need a tokenizer, and none can be loaded from {spec.path!r}: {type(error).__name__}: {error}"
        ) from error
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
