"""The rollout engine `acme_rollout`: a transformers model. Each pass gives every running completion one token.

The contract is `enginehouse.engines.rollout`. All methods are awaited on one event loop, and none may block it: the
model runs on a separate thread. Requests join and leave, and weights change, only between two tokens (a boundary).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from enginehouse.engines import (
    ALL,
    Endpoint,
    GenerateRequest,
    GenerateResult,
    Health,
    ModelSpec,
    PauseMode,
    ProcessContext,
    WeightChunk,
    WeightState,
    WeightUpdate,
    check_request,
    end_ids,
    positions,
)
from enginehouse.errors import EnginehouseError, ModelError
from enginehouse.quiet import quiet_transformers

from acme_rollout.batch import Batch, Job
from acme_rollout.rollout_options import AcmeRolloutOptions
from acme_rollout.served_weights import ServedWeights

T = TypeVar("T")


class AcmeRolloutEngine:
    """Implements `enginehouse.engines.rollout.RolloutEngine`."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="acme-rollout")
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []
        self._paused = self._draining = False
        self._ended = "the engine is not launched"

    # Launch and shutdown

    async def launch(self, model: ModelSpec, options: AcmeRolloutOptions, context: ProcessContext) -> Endpoint:
        """Load the model and be ready to generate, serving weight version 0.

        Raises:
            ModelError: the model does not exist, lacks a parameter, or cannot be loaded.
        """
        await self._on_thread(lambda: self._load(model, options, context))
        self._boundary = asyncio.Lock()  # its holder runs alone, between two tokens
        self._due = asyncio.Event()  # set while there is something to generate
        self._idle = asyncio.Event()  # set while nothing is running
        self._settle()
        self._ended = ""
        self._serving = asyncio.create_task(self._serve())
        return Endpoint(engine=f"transformers {transformers.__version__}", max_model_tokens=self._longest)

    def _load(self, spec: ModelSpec, options: AcmeRolloutOptions, context: ProcessContext) -> None:
        if not Path(spec.path).is_dir():
            raise ModelError(f"model path {spec.path!r} is not a directory; give a local Hugging Face model directory")
        try:
            with quiet_transformers():
                model, loaded = transformers.AutoModelForCausalLM.from_pretrained(
                    spec.path,
                    dtype=getattr(torch, spec.dtype),
                    trust_remote_code=spec.trust_remote_code,
                    local_files_only=True,
                    output_loading_info=True,
                    **options.native,
                )
        except Exception as error:
            raise ModelError(f"{spec.path!r} cannot be loaded: {type(error).__name__}: {error}") from error
        if loaded["missing_keys"]:
            raise ModelError(f"the weights in {spec.path!r} lack {', '.join(sorted(loaded['missing_keys']))}")
        model = model.to(context.device).eval().requires_grad_(False)
        text = model.config.get_text_config()
        limits = [limit for limit in (options.max_model_tokens, positions(text.to_dict())) if limit is not None]
        self._longest = min(limits) if limits else None
        self._vocabulary = text.vocab_size
        self._max_running = options.max_running
        self._spec = spec
        self._weights = ServedWeights(model, spec.path, str(context))
        ends = end_ids(*(getattr(config, "eos_token_id", None) for config in (model.generation_config, text)))
        self._batch = Batch(model, ends, lambda tokens: self._text_of(tokens))

    @cached_property
    def _text_of(self) -> Callable[[list[int]], str]:
        """Return the function that decodes tokens. The first request with stop strings loads the tokenizer."""
        # Not AutoTokenizer, because the files that transformers 5 writes name a class that this version lacks.
        tokenizer: Any = transformers.PreTrainedTokenizerFast.from_pretrained(self._spec.path, local_files_only=True)
        return lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    async def health(self) -> Health:
        """Return the state at once, also while the engine generates."""
        self._check()
        running = sum(row.reason is None for job in self._running for row in job.rows)
        return Health(running, len(self._waiting), self._paused, self._weights.version)

    async def shutdown(self) -> None:
        """Answer all requests with their tokens so far, and release everything."""
        if not self._ended:
            self._ended = "the engine was shut down"
            self._serving.cancel()
            await asyncio.to_thread(self._thread.shutdown)  # after the current token
            self._answer([*self._running, *self._waiting])
            del self._batch, self._weights

    def _check(self) -> None:
        if self._ended:
            raise EnginehouseError(f"acme_rollout: {self._ended}")

    # Requests

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Answer one request; many calls run at once. A call that is cancelled ends its request.

        Raises:
            EnginehouseError: this request cannot be served, or the engine was shut down.
        """
        self._check()
        check_request(request, self._vocabulary, self._longest)
        if request.sampling.stop:
            await self._on_thread(lambda: self._text_of)
        job = Job(request, asyncio.get_running_loop().create_future())
        self._waiting.append(job)
        self._settle()
        return await job.answer

    async def abort(self, ids: Sequence[str] | None = None) -> None:
        """End requests by id, or all requests; their `generate` returns the tokens so far, with reason `"abort"`."""
        self._check()
        async with self._boundary:
            jobs = [*self._running, *self._waiting]
            self._answer([job for job in jobs if ids is None or job.request.id in ids])

    async def pause(self, mode: PauseMode = "abort") -> None:
        """Stop generating, and return once no request runs; new requests wait."""
        self._check()
        if mode == "keep_cache":
            raise EnginehouseError("acme_engine does not declare 'pause_keep_cache'")
        self._paused, self._draining = True, mode == "wait"
        async with self._boundary:
            if mode == "abort":
                self._answer(self._running)
            self._settle()
        if mode == "wait":
            await self._idle.wait()

    async def resume(self) -> None:
        """Continue after `pause`."""
        self._check()
        self._paused = self._draining = False
        self._settle()

    async def sleep(self, tags: tuple[str, ...] = ALL) -> None:
        """Raise an error, because the capability `sleep` is not declared."""
        raise EnginehouseError("acme_rollout does not declare the capability 'sleep'")

    async def wake_up(self, tags: tuple[str, ...] = ALL) -> None:
        """Raise an error, because the capability `sleep` is not declared."""
        raise EnginehouseError("acme_rollout does not declare the capability 'sleep'")

    # Weights

    async def start_weight_update(self, update: WeightUpdate) -> None:
        """Prepare to stage a new version; an unfinished update is discarded.

        Raises:
            WeightSyncError: the version is not newer, or the model lacks one of the parameters.
        """
        self._check()
        self._weights.start(update)

    async def update_weights(self, chunk: WeightChunk) -> None:
        """Stage copies of some parameters.

        Raises:
            WeightSyncError: unknown name, wrong shape or dtype.
        """
        self._check()
        await self._on_thread(lambda: self._weights.stage(chunk))

    async def finish_weight_update(self, version: int) -> None:
        """Serve the staged weights as `version`; keys and values of kept requests are computed again.

        Raises:
            WeightSyncError: a parameter is missing; the old version is still served.
        """
        self._check()
        async with self._boundary:
            await self._on_thread(lambda: self._weights.switch(version))
            self._batch.weights_changed()

    async def abort_weight_update(self) -> None:
        """Discard the staged weights."""
        self._check()
        self._weights.discard()

    async def weight_state(self) -> WeightState:
        """Return the served version, with a checksum of each parameter."""
        self._check()
        async with self._boundary:
            return await self._on_thread(self._weights.state)

    # Generating

    async def _serve(self) -> None:
        """Compute tokens while there are requests. After an error all requests fail with it."""
        try:
            while True:
                await self._due.wait()
                async with self._boundary:
                    if not self._due.is_set():  # meanwhile it was paused, or all requests ended
                        continue
                    fresh = [] if self._paused else self._next()
                    self._running += fresh
                    await self._on_thread(lambda fresh=fresh: self._batch.advance(fresh, self._weights.version))
                    self._answer([job for job in self._running if all(row.reason for row in job.rows)])
        except Exception as error:
            self._ended = f"it failed: {type(error).__name__}: {error}"
            for job in [*self._running, *self._waiting]:
                if not job.answer.done():
                    job.answer.set_exception(EnginehouseError(f"acme_rollout: {self._ended}"))

    def _next(self) -> list[Job]:
        """Return the next requests in order: as many as there is room for, and at least one if nothing runs."""
        taken: list[Job] = []
        room = self._max_running - len(self._batch.rows)
        while self._waiting and (len(self._waiting[0].rows) <= room or not (taken or self._running)):
            taken.append(self._waiting.popleft())
            room -= len(taken[-1].rows)
        return taken

    def _answer(self, jobs: Sequence[Job]) -> None:
        """Answer requests with their tokens so far."""
        for job in jobs:
            if not job.answer.done():
                for row in job.rows:
                    row.reason = row.reason or "abort"
                job.answer.set_result(job.result(self._weights.version))
        self._settle()

    def _settle(self) -> None:
        """Forget answered and cancelled requests, and set the events."""
        self._running = [job for job in self._running if not job.answer.done()]
        self._waiting = deque(job for job in self._waiting if not job.answer.done())
        go_on = bool(self._running) and (not self._paused or self._draining)
        _set(self._due, go_on or (bool(self._waiting) and not self._paused))
        _set(self._idle, not self._running)

    async def _on_thread(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)


def _set(event: asyncio.Event, wanted: bool) -> None:
    if wanted:
        event.set()
    else:
        event.clear()
