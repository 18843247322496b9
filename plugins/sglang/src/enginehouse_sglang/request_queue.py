"""Sends requests to SGLang together, and gives each caller its own result."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from enginehouse.engines.progress import note_progress
from enginehouse.engines.rollout import GenerateRequest, GenerateResult, SamplingParams
from enginehouse.errors import EnginehouseError
from enginehouse_sglang.batch_gate import BatchGate, Kind, classify
from enginehouse_sglang.completions import PendingCompletion, join_completions, split_request
from enginehouse_sglang.http import HTTPStatusError
from enginehouse_sglang.labels import Labels
from enginehouse_sglang.served_adapter import ADAPTER
from enginehouse_sglang.server import SGLangServer
from enginehouse_sglang.weight_updates import SGLangWeights

logger = logging.getLogger(__name__)

MOST_CONNECTIONS = 256
"""Approximate number of connections that one turn's requests open: a process may have a thousand files open."""

ABORT_SECONDS, LONGEST_ABORT_SECONDS = 0.2, 5.0
"""Seconds before an abort is repeated: the first wait, which doubles each time, and the longest wait."""

PROGRESS_SECONDS = 10.0
"""Interval at which SGLang is asked for its load, because a long response arrives only at its end."""


@dataclass(eq=False, slots=True)
class PendingRequest:
    """A request without a result yet; `sent` is True once SGLang has it."""

    request: GenerateRequest
    completions: list[PendingCompletion]
    done: asyncio.Future[GenerateResult] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    sent: bool = False

    def mark_aborted(self) -> None:
        """Have every completion end as aborted."""
        for completion in self.completions:
            completion.aborted = True

    def finish(self) -> None:
        """Give the caller the result."""
        if not self.done.done():
            self.done.set_result(join_completions(self.request, self.completions))

    def fail(self, error: BaseException) -> None:
        """Give the caller an error."""
        if self.done.done():
            return
        if isinstance(error, asyncio.CancelledError):
            self.done.cancel()
        else:
            self.done.set_exception(error)


class RequestQueue:
    """Sends requests to SGLang and gives each caller its result.

    All requests of one turn of the event loop are sent at its end. If there are more than `MOST_CONNECTIONS`, requests
    with the same sampling parameters (except the seed) share a connection and are answered together.

    New requests wait here while the queue is `paused`. `server` returns the server, or raises if the server is lost;
    `ends` are the model's end-of-sequence tokens.
    """

    def __init__(
        self, server: Callable[[], SGLangServer], weights: SGLangWeights, labels: Labels, ends: frozenset[int]
    ):
        self._server = server
        self._weights = weights
        self._labels = labels
        self._ends = ends
        self._pending: dict[int, PendingRequest] = {}
        self._unsent: list[PendingRequest] = []
        self._serial = itertools.count()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._gate = BatchGate()
        self._scheduled = self._watching = False
        self.paused = False

    def __len__(self) -> int:
        return len(self._pending)

    def count_completions(self) -> tuple[int, int]:
        """Return how many completions SGLang is generating, and how many wait here."""
        sent = [request for request in self._pending.values() if request.sent and not request.done.done()]
        return sum(len(request.completions) for request in sent), sum(
            len(pending.completions) for pending in self._unsent
        )

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate the completions of a request. Cancelling the call aborts the request."""
        serial = next(self._serial)
        completions = split_request(request, self._labels.label(serial))
        pending = self._pending[serial] = PendingRequest(request, completions)
        self._unsent.append(pending)
        self.send_soon()
        if not self._watching:
            self._watching = True
            self._start_task(self._note_progress())
        try:
            return await asyncio.shield(pending.done)
        except asyncio.CancelledError:
            pending.mark_aborted()
            if pending.sent:
                self._start_task(self._abort_sent([pending]))
            raise
        finally:
            del self._pending[serial]
            if pending in self._unsent:
                self._unsent.remove(pending)

    def send_soon(self) -> None:
        """Send waiting requests at the end of this turn of the event loop, unless paused."""
        if self._unsent and not self._scheduled and not self.paused:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        self._scheduled = False
        if self.paused:
            return
        groups: dict[SamplingParams, list[PendingRequest]] = {}
        for pending in self._unsent:
            groups.setdefault(replace(pending.request.sampling, seed=None), []).append(pending)
            pending.sent = True
        together = -(-len(self._unsent) // MOST_CONNECTIONS)
        self._unsent.clear()
        for sampling, group in groups.items():
            for begin in range(0, len(group), together):
                self._start_task(self._serve(sampling, group[begin : begin + together]))

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.add(task := asyncio.ensure_future(work))
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, sampling: SamplingParams, group: Sequence[PendingRequest]) -> None:
        """Generate for some requests with the same sampling parameters, and answer them."""
        try:
            kind = classify(sampling, any(pending.request.sampling.seed is not None for pending in group))
            await self._complete(
                sampling, kind, [completion for pending in group for completion in pending.completions]
            )
        except HTTPStatusError as error:
            if len(group) > 1:  # SGLang rejects one of them, and the others can be served
                await asyncio.gather(*(self._serve(sampling, [pending]) for pending in group))
                return
            group[0].fail(EnginehouseError(f"request {group[0].request.id!r}: {error}"))
        except BaseException as error:
            for pending in group:
                pending.fail(error)
            if not isinstance(error, Exception):
                raise
        else:
            for pending in group:
                pending.finish()

    async def _complete(
        self, sampling: SamplingParams, kind: Kind | None, completions: Sequence[PendingCompletion]
    ) -> None:
        """Have SGLang generate until every completion has ended."""
        ends = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self._ends)
        missing = list(completions)
        while missing:
            async with self._gate.enter(kind):
                for completion in missing:
                    if completion.aborted:
                        completion.end("abort", self._weights.version)
                missing = [completion for completion in missing if not completion.aborted]
                served = self._weights.version
                adapter = None if self._weights.adapter is None else ADAPTER
                rows = [completion.build_row(sampling, ends, self._labels, served, adapter) for completion in missing]
                answers = await self._server().generate(rows) if rows else []
            served = self._weights.version
            missing = [
                completion
                for completion, answer in zip(missing, answers, strict=True)
                if not completion.take(answer, sampling, ends, self._labels, served)
            ]

    async def _note_progress(self) -> None:
        """Note progress while SGLang has requests and its load changes; a scheduler that hangs reports no change."""
        before = None
        try:
            while self._pending:
                await asyncio.sleep(PROGRESS_SECONDS)
                now = await self._server().load_now()
                if before not in (None, now):
                    note_progress()
                before = now
        except (EnginehouseError, LookupError) as error:  # the callers of these requests hear of a lost server
            logger.debug("%s: cannot read sglang's load: %s", self._labels.where, error)
        finally:
            self._watching = False

    async def abort(self, ids: Collection[str] | None = None) -> None:
        """End requests by id, or all requests. A request that shares a connection stops at once, but is answered with
        the other requests of its connection."""
        sent = []
        for pending in list(self._pending.values()):
            if ids is not None and pending.request.id not in ids:
                continue
            pending.mark_aborted()
            if pending.sent:
                sent.append(pending)
            elif pending in self._unsent:
                self._unsent.remove(pending)
                for completion in pending.completions:
                    completion.end("abort", self._weights.version)
                pending.finish()
        if sent:
            self._start_task(self._abort_sent(sent))
            await asyncio.sleep(0)

    async def _abort_sent(self, requests: Sequence[PendingRequest]) -> None:
        """Tell SGLang to end requests, and repeat that until they have ended, because some may not have arrived yet."""
        server = self._server()
        wait = ABORT_SECONDS
        while not all(pending.done.done() for pending in requests):
            rids = [completion.row_id for pending in requests for completion in pending.completions]
            for begin in range(0, len(rids), 64):
                await asyncio.gather(*(server.abort(rid) for rid in rids[begin : begin + 64]))
            await asyncio.wait([pending.done for pending in requests], timeout=wait)
            wait = min(2 * wait, LONGEST_ABORT_SECONDS)

    def note_kept(self) -> None:
        """Note that the keys and values of all requests that SGLang has were kept over a weight update."""
        for pending in self._pending.values():
            for completion in pending.completions if pending.sent else ():
                completion.kept = True

    async def wait_for_sent(self) -> None:
        """Wait until SGLang has answered every request that it has now."""
        if sent := [pending.done for pending in self._pending.values() if pending.sent]:
            await asyncio.wait(sent)

    def close(self, error: BaseException) -> None:
        """Fail every request."""
        for task in list(self._tasks):
            task.cancel()
        for pending in list(self._pending.values()):
            pending.fail(error)
