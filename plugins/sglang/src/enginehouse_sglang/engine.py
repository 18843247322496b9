"""SGLang as a rollout engine: its HTTP server, started and watched by the worker or running already."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import json
import logging
import os
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from enginehouse.engines.model import TOKENIZER_FILES, ModelSpec, ProcessContext, end_ids
from enginehouse.engines.plain_path import PlainPath
from enginehouse.engines.progress import note_progress
from enginehouse.engines.requests import check_request
from enginehouse.engines.rollout import (
    Endpoint,
    GenerateRequest,
    GenerateResult,
    Health,
    PauseMode,
    SamplingParams,
)
from enginehouse.engines.sleep import check_awake, check_weights_awake, sleeping
from enginehouse.engines.train import ALL
from enginehouse.engines.weights import WeightChunk, WeightState, WeightUpdate
from enginehouse.errors import ConfigError, EnginehouseError, ModelError
from enginehouse_sglang.arguments import CONTEXT_MARGIN, environment, server_arguments
from enginehouse_sglang.attaching import attach
from enginehouse_sglang.batch_gate import BatchGate, Kind, classify
from enginehouse_sglang.completions import PendingCompletion, drawings, result
from enginehouse_sglang.http import HTTPStatusError
from enginehouse_sglang.labels import Labels
from enginehouse_sglang.on_cpu.torchvision import declare_operators
from enginehouse_sglang.options import SGLangOptions
from enginehouse_sglang.process import ServerProcess, SGLangFailed, free_port
from enginehouse_sglang.server import SGLangServer
from enginehouse_sglang.weight_updates import SGLangWeights

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.2
"""How often a server that starts is asked whether it answers; and after which rows that are to end are named again."""

MOST_CONNECTIONS = 256
"""About how many connections the requests of one turn open: a process may have a thousand files open."""

LONGEST_LOOK_SECONDS = 5.0
"""Of the time after which they are named again, which doubles."""

PROGRESS_SECONDS = 10.0
"""How often SGLang is asked whether it gets on with what it draws: a long answer is answered whole, at its end."""


@dataclass(eq=False, slots=True)
class _Call:
    """A request on its way.

    Attributes:
        request: the request.
        drawn: its completions.
        done: its result.
        sent: whether SGLang has been asked.
    """

    request: GenerateRequest
    drawn: list[PendingCompletion]
    done: asyncio.Future[GenerateResult] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    sent: bool = False


class SGLangRollout:
    """Implements `enginehouse.engines.rollout.RolloutEngine`, whose docstrings are the contract.

    What it adds to the contract:

    * A request is one to SGLang, with a row for each of its samples, and ends by itself. Of more than
      `MOST_CONNECTIONS` that come in one turn of the event loop, some with the same sampling parameters (but for the
      seed) travel together, and are answered together.
    * `pause("keep")` and a weight update: kept sequences go on with keys and values computed anew from the new weights.
    * With a server that ran already, a pause holds what others ask of it too, and does not end it.
    * A server that dies ends the replica: requests not finished raise `SGLangFailed`, as does every later call.
    """

    def __init__(self) -> None:
        self._server: SGLangServer | None = None
        self._calls: dict[int, _Call] = {}
        self._serial = itertools.count()
        self._new: list[_Call] = []  # not handed over yet: of this turn of the loop, or come while paused
        self._scheduled = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._watching = False
        self._turns = BatchGate()
        self._paused = False
        self._held = False
        self._asleep: frozenset[str] = frozenset()

    @property
    def server(self) -> SGLangServer:
        """What SGLang is asked through.

        Raises:
            SGLangFailed: it is not launched, or has died.
            WeightsLost: a weight update left it without a whole model.
        """
        if self._server is None:
            raise SGLangFailed("the sglang rollout engine is not launched")
        process = self._server.process
        if process is not None and not process.lives():
            raise SGLangFailed(process.death())
        self._weights.check()
        return self._server

    async def launch(self, model: ModelSpec, options: SGLangOptions, context: ProcessContext) -> Endpoint:
        """Start SGLang, or find the server that runs already; and generate one token.

        Raises:
            ModelError: SGLang cannot load the model or run it on this device; a server serves another one; or there is
                no tokenizer for the endpoint.
            ConfigError: SGLang does not take an argument of `native`, or there is no SGLang server at `endpoint`.
        """
        self._where = str(context)
        if model.head != "causal_lm":
            raise ModelError(f"sglang generates text; it cannot serve {model.path!r} with a {model.head!r} head")
        if not Path(model.path, "config.json").is_file():
            raise ModelError(f"{model.path!r} is not a model directory: it holds no config.json")
        self._has_tokenizer = any(any(Path(model.path).glob(pattern)) for pattern in TOKENIZER_FILES)
        if options.openai_endpoint and not self._has_tokenizer:
            raise ModelError(f"an OpenAI endpoint needs a tokenizer, and there is none in {model.path!r}")
        self._config = json.loads(Path(model.path, "config.json").read_text())
        own = self._config.get("text_config", self._config)
        self._vocabulary = int(own["vocab_size"])
        file = Path(model.path, "generation_config.json")
        generation = json.loads(file.read_text()) if file.is_file() else {}
        self._ends = frozenset(end_ids(generation.get("eos_token_id"), own.get("eos_token_id")))
        self._labels = Labels(self._where)
        self._plain = PlainPath(model.path)
        told = replace(model, path=self._plain.path)
        self._weights = SGLangWeights(told, self._where, self._labels)
        self._can_sleep = not options.endpoint and (context.takes_turns or context.device == "cpu")
        await asyncio.to_thread(self._learn, context)
        try:
            settings = await (
                self._attach(model, options, context) if options.endpoint else self._start(told, options, context)
            )
            self._ranks = int(settings.get("tp_size") or 1)
            self._max_model_tokens = await self.server.context() - CONTEXT_MARGIN
            if options.max_model_tokens is not None:
                self._max_model_tokens = min(self._max_model_tokens, options.max_model_tokens)
            await self.generate(GenerateRequest("launch", [0], SamplingParams(max_tokens=1)))
        except BaseException as error:
            await self.shutdown()
            if isinstance(error, SGLangFailed):
                raise ModelError(f"{self._where}: sglang cannot serve {model.path!r}: {error}") from error
            raise
        url = f"{self.server.address.url}/v1" if options.openai_endpoint else None
        return Endpoint(f"sglang {settings.get('version')}", url, self._max_model_tokens)

    def _learn(self, context: ProcessContext) -> None:
        if context.device == "cpu" and importlib.util.find_spec("torchvision") is not None:
            declare_operators()  # transformers, which is asked, imports it too
        self._weights.learn()

    async def _start(self, model: ModelSpec, options: SGLangOptions, context: ProcessContext) -> dict[str, Any]:
        host = context.node if options.openai_endpoint == "node" else "127.0.0.1"
        try:
            port = free_port(host)
        except OSError as error:
            raise ConfigError(f"no OpenAI endpoint can be opened on {host}: {error}") from error
        admin_key = secrets.token_urlsafe(24)
        arguments = server_arguments(model, self._config, options, context, self._has_tokenizer)
        arguments |= {"host": host, "port": port, "admin_api_key": admin_key}
        arguments["weight_version"] = self._labels.label(0)
        key = os.environ.get("SGLANG_API_KEY") if options.openai_endpoint else admin_key
        if key:
            arguments["api_key"] = key
        process = ServerProcess(arguments, environment(options, context), self._where)
        shown = f"[{host}]" if ":" in host else host
        server = self._server = SGLangServer(f"http://{shown}:{port}", self._where, process, key, admin_key)
        while not await self._answers(server):
            await asyncio.wait([process.died], timeout=LOOK_SECONDS)
        return await server.settings()

    async def _answers(self, server: SGLangServer) -> bool:
        assert server.process is not None
        if not server.process.lives():
            said = server.process.death()
            if "unrecognized arguments" in said or "error: argument" in said:
                raise ConfigError(f"sglang does not take an argument of `native`: {said}")
            raise SGLangFailed(said)
        try:
            await server.address.call("GET", "/ready")
        except EnginehouseError:
            return False
        return True

    async def _attach(self, model: ModelSpec, options: SGLangOptions, context: ProcessContext) -> dict[str, Any]:
        replica = int(context.labels.get("replica", context.rank))
        if replica >= len(options.endpoint):
            raise ConfigError(f"endpoint: there are {len(options.endpoint)} URLs, and none for replica {replica}")
        server = SGLangServer(options.endpoint[replica], self._where)
        settings = await attach(server, model)
        self._server = server
        self._ranks = int(settings.get("tp_size") or 1)
        # What it serves may be what another run left there.
        await server.hold()
        try:
            await self._weights.give_first(server, self._ranks)
        finally:
            await server.go_on()
        return settings

    # Generation

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate; cancelling the call ends the request.

        Raises:
            EnginehouseError: the request cannot be served as it stands, for instance its prompt is too long.
            SGLangFailed: the server has died.
            WeightsLost: a weight update left it without a whole model.
        """
        _ = self.server
        check_awake(self._asleep, self._weights.is_lost)
        check_request(request, self._vocabulary, self._max_model_tokens)
        if request.sampling.stop and not self._has_tokenizer:
            raise ModelError("stop strings need a tokenizer, and the model has none")
        serial = next(self._serial)
        call = self._calls[serial] = _Call(request, drawings(request, self._labels.label(serial)))
        self._new.append(call)
        self._hand_over_soon()
        if not self._watching:
            self._watching = True
            self._do(self._note_progress())
        try:
            return await asyncio.shield(call.done)
        except asyncio.CancelledError:
            _mark(call)
            if call.sent:
                self._do(self._end([call]))
            raise
        finally:
            del self._calls[serial]
            if call in self._new:
                self._new.remove(call)

    def _hand_over_soon(self) -> None:
        if not self._scheduled and not self._paused:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._hand_over)

    def _hand_over(self) -> None:
        """Ask SGLang for what has come in this turn."""
        self._scheduled = False
        if self._paused:
            return
        groups: dict[SamplingParams, list[_Call]] = {}
        for call in self._new:
            groups.setdefault(replace(call.request.sampling, seed=None), []).append(call)
            call.sent = True
        together = -(-len(self._new) // MOST_CONNECTIONS)
        self._new.clear()
        for sampling, calls in groups.items():
            for begin in range(0, len(calls), together):
                self._do(self._serve(sampling, calls[begin : begin + together]))

    async def _note_progress(self) -> None:
        """Note that SGLang gets on while it has requests and what it holds changes; a scheduler that hangs says nothing
        new."""
        before = None
        try:
            while self._calls:
                await asyncio.sleep(PROGRESS_SECONDS)
                now = await self.server.load_now()
                if before not in (None, now):
                    note_progress()
                before = now
        except (EnginehouseError, LookupError) as error:  # those whose requests these are hear of a lost server
            logger.debug("%s: sglang does not tell its load: %s", self._where, error)
        finally:
            self._watching = False

    def _do(self, work: Awaitable[Any]) -> None:
        self._tasks.add(task := asyncio.ensure_future(work))  # type: ignore[arg-type]
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, sampling: SamplingParams, calls: Sequence[_Call]) -> None:
        """Draw some requests of the same sampling, and hand out what came of them."""
        try:
            kind = classify(sampling, any(call.request.sampling.seed is not None for call in calls))
            await self._draw(sampling, kind, [one for call in calls for one in call.drawn])
        except HTTPStatusError as error:
            if len(calls) > 1:  # of one of them, which is to be the only one to suffer
                await asyncio.gather(*(self._serve(sampling, [call]) for call in calls))
                return
            why = str(error)
            _settle(calls, lambda call: EnginehouseError(f"request {call.request.id!r}: {why}"))
        except BaseException as error:
            failure = error
            _settle(calls, lambda call: failure)
            if not isinstance(error, Exception):
                raise
        else:
            _settle(calls, lambda call: result(call.request, call.drawn))

    async def _draw(self, sampling: SamplingParams, kind: Kind | None, drawn: Sequence[PendingCompletion]) -> None:
        ends = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self._ends)
        missing = list(drawn)
        while missing:
            async with self._turns.of(kind):
                for one in missing:
                    if one.aborted:
                        one.end("abort", self._weights.version)
                asked = [one for one in missing if not one.aborted]
                answers = await self.server.generate([one.row(sampling, ends) for one in asked]) if asked else []
            served = self._weights.version
            ended = [
                one.take(answer, sampling, ends, self._labels, served)
                for one, answer in zip(asked, answers, strict=True)
            ]
            missing = [one for one, over in zip(asked, ended, strict=True) if not over]

    # Control

    async def abort(self, ids: Sequence[str] | None = None) -> None:
        """See the protocol; requests that wait are ended too, with no tokens.

        One that travels with others (see the class) stops at once, and is answered with them.
        """
        _ = self.server
        calls = [call for call in self._calls.values() if ids is None or call.request.id in ids]
        sent = []
        for call in calls:
            _mark(call)
            if call.sent:
                sent.append(call)
            elif call in self._new:
                self._new.remove(call)
                for one in call.drawn:
                    one.end("abort", self._weights.version)
                _settle([call], lambda call: result(call.request, call.drawn))
        if sent:
            self._do(self._end(sent))
            await asyncio.sleep(0)

    async def _end(self, calls: Sequence[_Call]) -> None:
        """Tell SGLang to end requests, until they have ended: one may still be on its way to it."""
        server = self.server
        wait = LOOK_SECONDS
        while not all(call.done.done() for call in calls):
            rids = [f"{one.rid}-{one.begun}" for call in calls for one in call.drawn]
            for begin in range(0, len(rids), 64):
                await asyncio.gather(*(server.abort(rid) for rid in rids[begin : begin + 64]))
            await asyncio.wait([call.done for call in calls], timeout=wait)
            wait = min(2 * wait, LONGEST_LOOK_SECONDS)

    async def pause(self, mode: PauseMode = "abort") -> None:
        """See the protocol."""
        _ = self.server
        self._paused = True
        if mode == "abort":
            await self.abort()
        if mode != "keep":
            # Not those that have come since: they wait.
            await self._outlived(asyncio.gather(*(_over(call) for call in self._calls.values() if call.sent)))
        if not self._held:
            await self.server.hold()
            self._held = True

    async def _outlived(self, call: Awaitable[Any]) -> None:
        process = self.server.process
        await (call if process is None else process.outlived(call))

    async def resume(self) -> None:
        """See the protocol."""
        await self._go_on()
        self._paused = False
        if self._new:
            self._hand_over_soon()

    async def _go_on(self) -> None:
        """Have SGLang draw again, if it can."""
        if not self._asleep and not self._weights.is_lost:
            await self.server.go_on()
            self._held = False

    async def sleep(self, tags: tuple[str, ...] = ALL) -> None:
        """See the protocol; what others ask of the server waits until all is awake, and has weights."""
        server, new = self.server, sleeping(tags) - self._asleep
        if self._calls:
            raise EnginehouseError(f"sglang cannot sleep while {len(self._calls)} requests are under way")
        if not self._can_sleep:
            raise EnginehouseError(
                f"{self._where}: the sglang server cannot sleep: it ran already, or was started without a memory "
                "saver, as nobody takes turns"
            )
        if not new:
            return
        before, self._asleep = self._asleep, self._asleep | new
        try:
            if "weights" in new:
                self._weights.forget()
            if not self._held:
                self._held = True
                await server.hold()
            await server.release(sorted(new))
        except BaseException:
            self._asleep = before  # it may be asked again; without weights it draws nothing either way
            raise

    async def wake_up(self, tags: tuple[str, ...] = ALL) -> None:
        """See the protocol."""
        server = self.server
        if waking := sleeping(tags) & self._asleep:
            await server.take_back(sorted(waking))
            self._asleep -= waking
            if not self._paused:
                await self._go_on()

    # Weights

    async def start_weight_update(self, update: WeightUpdate) -> None:
        """See the protocol. An update that was started and not finished is thrown away."""
        _ = self.server
        check_weights_awake(self._asleep)
        await asyncio.to_thread(self._weights.start, update)

    async def update_weights(self, chunk: WeightChunk) -> None:
        """See the protocol."""
        _ = self.server
        await asyncio.to_thread(self._weights.stage, chunk)

    async def finish_weight_update(self, version: int) -> None:
        """See the protocol."""
        await self._weights.commit(self.server, self._ranks, version)

    async def abort_weight_update(self) -> None:
        """See the protocol."""
        self._weights.discard()

    async def weight_state(self) -> WeightState:
        """See the protocol."""
        return await self._weights.state(self.server)

    # Life

    async def health(self) -> Health:
        """See the protocol.

        Raises:
            SGLangFailed: the server has died, or does not answer.
            WeightsLost: a weight update left it without a whole model.
        """
        await self.server.model()
        sent = sum(len(call.drawn) for call in self._calls.values() if call.sent and not call.done.done())
        waiting = sum(len(call.drawn) for call in self._new)
        return Health(sent, waiting, self._paused, self._weights.version)

    async def shutdown(self) -> None:
        """End a server of ours, and let one that ran already go on; what runs raises `SGLangFailed`."""
        server, self._server = self._server, None
        if server is None:
            return
        lost = SGLangFailed(f"{self._where}: the sglang rollout engine was shut down")
        for task in list(self._tasks):
            task.cancel()
        _settle(list(self._calls.values()), lambda call: lost)
        if server.process is not None:
            await server.process.end()
        elif self._held:
            await server.go_on()
        self._plain.close()


def _mark(call: _Call) -> None:
    for one in call.drawn:
        one.aborted = True


def _settle(calls: Sequence[_Call], outcome: Callable[[_Call], GenerateResult | BaseException]) -> None:
    for call in calls:
        if call.done.done():
            continue
        came = outcome(call)
        if isinstance(came, asyncio.CancelledError):
            call.done.cancel()
        elif isinstance(came, BaseException):
            call.done.set_exception(came)
        else:
            call.done.set_result(came)


async def _over(call: _Call) -> None:
    """Wait for a request's end, whatever it is."""
    await asyncio.wait([call.done])
