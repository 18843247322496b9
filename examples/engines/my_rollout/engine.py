"""A rollout engine: one pass over all tokens of the running rows for each new token."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from enginehouse.engines import (
    ALL,
    Completion,
    Endpoint,
    GenerateRequest,
    GenerateResult,
    Health,
    ModelSpec,
    ProcessContext,
    WeightChunk,
    WeightState,
    WeightSyncError,
    WeightUpdate,
    check_request,
    end_ids,
    positions,
)
from enginehouse.errors import EnginehouseError
from enginehouse.weights import checksum, stored_names, unique_state
from enginehouse_torch.modeling.loading import load_model
from enginehouse_torch.modeling.ranks import device_of
from my_rollout.options import Options


@dataclass(eq=False)
class Row:
    """A completion in progress."""

    request: GenerateRequest
    draw: torch.Generator
    drawn: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    ended: str = ""

    def completion(self, version: int) -> Completion:
        """Return the completion."""
        versions = self.versions or [version]
        return Completion(self.drawn, self.logprobs, self.ended, versions[0], versions[-1])


@dataclass(eq=False)
class Waiting:
    """A request whose answer a caller awaits."""

    rows: list[Row]
    answer: asyncio.Future


class Engine:
    """`RolloutEngine`. Code that changes the model or the queue holds `_boundary`, so it runs between two tokens."""

    async def launch(self, model: ModelSpec, options: Options, context: ProcessContext) -> Endpoint:
        """Load the model and begin to serve."""
        self._model = (await asyncio.to_thread(load_model, model, device_of(context))).requires_grad_(False)
        text = self._model.config.get_text_config()
        self._vocabulary = text.vocab_size
        limits = [limit for limit in (options.max_model_tokens, positions(text.to_dict())) if limit is not None]
        self._longest, self._most = min(limits, default=None), options.max_running
        self._ends = set(end_ids(self._model.generation_config.eos_token_id, text.eos_token_id))
        self._parameters = unique_state(self._model, stored_names(Path(model.path)))
        self._version, self._update, self._staged = 0, None, {}
        self._waiting: list[Waiting] = []
        self._running: list[Waiting] = []
        self._paused, self._failed, self._drawn = False, "", 0
        self._work, self._boundary = asyncio.Event(), asyncio.Lock()
        self._task = asyncio.create_task(self._serve())
        return Endpoint(f"my_rollout, transformers {transformers.__version__}", max_model_tokens=self._longest)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Wait for a request's rows to end."""
        self._check()
        check_request(request, self._vocabulary, self._longest)
        if request.sampling.stop or request.sampling.prompt_logprobs:
            raise EnginehouseError("my_rollout declares neither 'stop_strings' nor 'prompt_logprobs'")
        rows = []
        for number in range(request.sampling.n):
            draw = torch.Generator()
            if request.sampling.seed is None:
                draw.seed()
            else:
                draw.manual_seed((request.sampling.seed * 1009 + number) % 2**63)
            rows.append(Row(request, draw, ended="" if request.sampling.max_tokens else "length"))
        waiting = Waiting(rows, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._work.set()
        try:
            return await waiting.answer
        except asyncio.CancelledError:
            for row in rows:
                row.ended = "abort"
            raise

    async def _serve(self) -> None:
        """Generate a token for everything that runs, again and again."""
        while True:
            await self._work.wait()
            async with self._boundary:
                if not self._paused:
                    self._admit()
                if self._paused or not self._running:
                    self._work.clear()
                    continue
                try:
                    rows = [row for waiting in self._running for row in waiting.rows if not row.ended]
                    if rows:
                        await asyncio.to_thread(self._token, rows)
                except Exception as error:
                    self._failed = f"my_rollout failed: {type(error).__name__}: {error}"
                    self._end(EnginehouseError(self._failed))
                    return
                self._answer()

    def _admit(self) -> None:
        while self._waiting:
            running = sum(len(waiting.rows) for waiting in self._running)
            if self._running and running + len(self._waiting[0].rows) > self._most:
                return
            self._running.append(self._waiting.pop(0))

    def _answer(self) -> None:
        for waiting in [request for request in self._running if all(row.ended for row in request.rows)]:
            self._running.remove(waiting)
            self._result(waiting)

    def _result(self, waiting: Waiting) -> None:
        if not waiting.answer.done():
            completions = [row.completion(self._version) for row in waiting.rows]
            waiting.answer.set_result(GenerateResult(waiting.rows[0].request.id, completions))

    @torch.no_grad()
    def _token(self, rows: list[Row]) -> None:
        """Generate the next token of each row."""
        sequences = [torch.tensor([*row.request.prompt_ids, *row.drawn]) for row in rows]
        last = torch.tensor([len(sequence) - 1 for sequence in sequences])
        padded = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True).to(self._model.device)
        logits = self._model(input_ids=padded, use_cache=False).logits[torch.arange(len(rows)), last].float().cpu()
        for row, scores in zip(rows, logits, strict=True):
            sampling = row.request.sampling
            logprobs = (scores / (sampling.temperature or 1.0)).log_softmax(-1)
            token = int(scores.argmax()) if sampling.temperature == 0 else self._drawn_from(logprobs, row)
            row.drawn.append(token)
            row.logprobs.append(float(logprobs[token]))
            row.versions.append(self._version)
            if token in sampling.stop_token_ids or (token in self._ends and not sampling.ignore_eos):
                row.ended = "stop"
            elif len(row.drawn) == sampling.max_tokens:
                row.ended = "length"

    @staticmethod
    def _drawn_from(logprobs: torch.Tensor, row: Row) -> int:
        sampling = row.request.sampling
        ordered, ids = logprobs.exp().sort(descending=True)
        kept = ordered.cumsum(-1) - ordered < sampling.top_p
        if sampling.top_k:
            kept[sampling.top_k :] = False
        return int(ids[torch.multinomial(ordered * kept, 1, generator=row.draw)])

    async def abort(self, ids: Sequence[str] | None = None) -> None:
        """End requests between two tokens."""
        async with self._boundary:
            self._abort(ids)

    def _abort(self, ids: Sequence[str] | None, waiting_too: bool = True) -> None:
        for queue in (self._running, self._waiting) if waiting_too else (self._running,):
            for waiting in [held for held in queue if ids is None or held.rows[0].request.id in ids]:
                queue.remove(waiting)
                for row in waiting.rows:
                    row.ended = row.ended or "abort"
                self._result(waiting)

    async def pause(self, mode: str = "abort") -> None:
        """Generate nothing until `resume`."""
        self._check()
        if mode not in ("abort", "wait"):
            raise EnginehouseError(f"my_rollout does not declare 'pause_{mode}'")
        if mode == "wait":
            most, self._most = self._most, 0
            while self._running:
                await asyncio.wait([waiting.answer for waiting in self._running])
            self._most = most
        async with self._boundary:
            self._paused = True
            self._abort(None, waiting_too=False)

    async def resume(self) -> None:
        """Continue to generate."""
        self._paused = False
        self._work.set()

    async def sleep(self, tags: tuple[str, ...] = ALL) -> None:
        """Reject the call: `sleep` is not declared."""
        raise EnginehouseError("my_rollout does not declare 'sleep'")

    async def wake_up(self, tags: tuple[str, ...] = ALL) -> None:
        """Reject the call: `sleep` is not declared."""
        raise EnginehouseError("my_rollout does not declare 'sleep'")

    async def start_weight_update(self, update: WeightUpdate) -> None:
        """Check an update and begin to stage it."""
        if update.version <= self._version:
            raise WeightSyncError(f"my_rollout serves version {self._version}; version {update.version} is not newer")
        for meta in update.parameters:
            self._fits(meta.name, meta.shape, meta.dtype)
        self._update, self._staged = update, {}

    async def update_weights(self, chunk: WeightChunk) -> None:
        """Copy the chunk's tensors."""
        if self._update is None:
            raise WeightSyncError("my_rollout was sent weights, but no update was started")
        for name, tensor in chunk.tensors:
            self._fits(name, tensor.shape, str(tensor.dtype).removeprefix("torch."))
            self._staged[name] = tensor.detach().clone()

    def _fits(self, name: str, shape: Sequence[int], dtype: str) -> None:
        own = self._parameters.get(name)
        if own is None or tuple(own.shape) != tuple(shape) or str(own.dtype) != f"torch.{dtype}":
            raise WeightSyncError(f"my_rollout has no parameter {name!r} of {dtype} {tuple(shape)}", parameters=[name])

    async def finish_weight_update(self, version: int) -> None:
        """Serve what was staged."""
        if self._update is None or self._update.version != version:
            raise WeightSyncError(f"my_rollout was told to finish version {version}, which was not started")
        if missing := [name for name in self._parameters if name not in self._staged]:
            raise WeightSyncError(f"the update to version {version} lacks {missing[0]!r}", parameters=missing)
        async with self._boundary:
            for name, tensor in self._staged.items():
                self._parameters[name].copy_(tensor)
            self._version = version
        self._update, self._staged = None, {}

    async def abort_weight_update(self) -> None:
        """Discard the staged weights."""
        self._update, self._staged = None, {}

    async def weight_state(self) -> WeightState:
        """Return the served version and the checksums."""
        async with self._boundary:
            return WeightState(self._version, {name: checksum(tensor) for name, tensor in self._parameters.items()})

    async def health(self) -> Health:
        """Return the load."""
        self._check()
        running = sum(not row.ended for waiting in self._running for row in waiting.rows)
        return Health(running, len(self._waiting), self._paused, self._version)

    async def shutdown(self) -> None:
        """Stop generating and fail the open requests."""
        self._failed = "my_rollout was shut down"
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._end(EnginehouseError(self._failed))
        self._model, self._parameters = None, {}

    def _end(self, error: Exception) -> None:
        for waiting in (*self._running, *self._waiting):
            if not waiting.answer.done():
                waiting.answer.set_exception(error)
        self._running, self._waiting = [], []

    def _check(self) -> None:
        if self._failed:
            raise EnginehouseError(self._failed)
