"""SGLang as a rollout engine: its HTTP server, which the worker starts and watches, or which runs already."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from enginehouse.engines.model import TOKENIZER_FILES, ModelSpec, ProcessContext, end_ids
from enginehouse.engines.plain_path import PlainPath
from enginehouse.engines.requests import check_request
from enginehouse.engines.rollout import Endpoint, GenerateRequest, GenerateResult, Health, PauseMode, SamplingParams
from enginehouse.engines.sleep import check_awake, check_weights_awake, sleeping
from enginehouse.engines.train import ALL
from enginehouse.engines.weights import WeightChunk, WeightState, WeightUpdate
from enginehouse.errors import ConfigError, EnginehouseError, ModelError
from enginehouse.weights.form import adapted_layers
from enginehouse_sglang.attaching import attach
from enginehouse_sglang.http import HTTPStatusError
from enginehouse_sglang.labels import Labels
from enginehouse_sglang.on_cpu.torchvision import declare_operators
from enginehouse_sglang.options import SGLangOptions
from enginehouse_sglang.process import SGLangFailed
from enginehouse_sglang.request_queue import RequestQueue
from enginehouse_sglang.served_adapter import ADAPTER, adapter_arguments, adapter_settings, check_layers
from enginehouse_sglang.server import SGLangServer
from enginehouse_sglang.starting import CONTEXT_MARGIN, server_arguments, start_server
from enginehouse_sglang.weight_updates import SGLangWeights


class SGLangRollout:
    """Implements `enginehouse.engines.rollout.RolloutEngine`, whose docstrings are the contract.

    In addition:

    * A request is one HTTP request with a row for each sample, and ends by itself. If more than `MOST_CONNECTIONS`
      arrive in one turn of the event loop, some share a connection and are answered together (`RequestQueue`).
    * After `pause("keep_cache")`, the token that SGLang was computing is reported with the version that is served after
      the pause, and an aborted request ends only after `resume`.
    * On a server that ran already, a pause also holds the requests of other clients, and does not end them.
    * A server that dies ends the replica: unfinished requests and every later call raise `SGLangFailed`.
    * Every method that needs the server raises `WeightsLost` if a weight update left it without a complete model.
    """

    def __init__(self) -> None:
        self._server: SGLangServer | None = None
        self._held: Literal["no", "retracted", "in place"] = "no"
        self._asleep: frozenset[str] = frozenset()

    @property
    def server(self) -> SGLangServer:
        """The server. Raises `SGLangFailed` if it is not alive, or `WeightsLost` if it has no complete model."""
        if self._server is None:
            raise SGLangFailed("the sglang rollout engine is not launched")
        process = self._server.process
        if process is not None and not process.is_alive():
            raise SGLangFailed(process.describe_death())
        self._weights.check()
        return self._server

    async def launch(self, model: ModelSpec, options: SGLangOptions, context: ProcessContext) -> Endpoint:
        """Start SGLang or find the server that runs already, and generate one token.

        Raises:
            ModelError: SGLang cannot load the model or run it on this device; a server serves another model; or the
                endpoint has no tokenizer.
            ConfigError: SGLang rejects an argument of `native`, or there is no SGLang server at `endpoint`.
        """
        self._where = str(context)
        config = self._read_config(model, options)
        options.refuse_adapter(model, context.device)
        labels = Labels(self._where)
        self._plain = PlainPath(model.path)
        spec = replace(model, path=self._plain.path)
        self._weights = SGLangWeights(spec, self._where, labels, reads_back=not options.moves_experts)
        self._queue = RequestQueue(lambda: self.server, self._weights, labels, self._ends)
        self._has_clients = bool(options.endpoint or options.openai_endpoint)
        self._can_sleep = not options.endpoint and (context.takes_turns or context.device == "cpu")
        if context.device == "cpu" and importlib.util.find_spec("torchvision") is not None:
            await asyncio.to_thread(declare_operators)  # transformers, which `learn` asks, imports torchvision too
        await asyncio.to_thread(self._weights.learn)
        try:
            if options.endpoint:
                settings = await self._attach(model, options, context)
            else:
                arguments = server_arguments(spec, config, options, context, self._has_tokenizer)
                arguments["weight_version"] = labels.label(0)
                layers: Sequence[str] = ()
                if model.adapter is not None:
                    check_layers(layers := adapted_layers(model.adapter, self._weights.parameters))
                    arguments |= adapter_arguments(model.adapter, layers, context.device)
                self._server = await start_server(arguments, options, context)
                settings = await self.server.settings()
                if model.adapter is not None:
                    self._weights.adapter_settings = adapter_settings(model.adapter, layers)
                    await self.server.add_adapter(ADAPTER, self._weights.adapter_settings, options.tensor_parallel)
            self._ranks = int(settings.get("tp_size") or 1)
            self._max_model_tokens = await self.server.context() - CONTEXT_MARGIN
            if options.max_model_tokens is not None:
                self._max_model_tokens = min(self._max_model_tokens, options.max_model_tokens)
            await self.generate(GenerateRequest("launch", [0], SamplingParams(max_tokens=1)))
        except BaseException as error:
            await self.shutdown()
            self._plain.close()
            if isinstance(error, SGLangFailed):
                raise ModelError(f"{self._where}: sglang cannot serve {model.path!r}: {error}") from error
            raise
        url = f"{self.server.address.url}/v1" if options.openai_endpoint else None
        return Endpoint(f"sglang {settings.get('version')}", url, self._max_model_tokens)

    def _read_config(self, model: ModelSpec, options: SGLangOptions) -> dict[str, Any]:
        """Return the model's `config.json`; learn its vocabulary, its end tokens and whether it has a tokenizer."""
        if model.head != "causal_lm":
            raise ModelError(f"sglang generates text; it cannot serve {model.path!r} with a {model.head!r} head")
        directory = Path(model.path)
        if not (directory / "config.json").is_file():
            raise ModelError(f"{model.path!r} is not a model directory: it holds no config.json")
        self._has_tokenizer = any(any(directory.glob(pattern)) for pattern in TOKENIZER_FILES)
        if options.openai_endpoint and not self._has_tokenizer:
            raise ModelError(f"an OpenAI endpoint needs a tokenizer, and there is none in {model.path!r}")
        config: dict[str, Any] = json.loads((directory / "config.json").read_text())
        text = config.get("text_config", config)
        file = directory / "generation_config.json"
        generation = json.loads(file.read_text()) if file.is_file() else {}
        self._vocabulary = int(text["vocab_size"])
        self._ends = frozenset(end_ids(generation.get("eos_token_id"), text.get("eos_token_id")))
        return config

    async def _attach(self, model: ModelSpec, options: SGLangOptions, context: ProcessContext) -> dict[str, Any]:
        """Find this replica's server and give it the model's weights, since it may have another run's weights."""
        replica = int(context.labels.get("replica", context.rank))
        if replica >= len(options.endpoint):
            raise ConfigError(
                f"endpoint must have a URL for each replica, but replica {replica} has none: the number of URLs is "
                f"{len(options.endpoint)}"
            )
        server = SGLangServer(options.endpoint[replica], self._where)
        settings = await attach(server, model)
        self._server = server
        await server.hold()
        try:
            await self._weights.give_first(server, int(settings.get("tp_size") or 1))
        finally:
            await server.go_on()
        return settings

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate the completions of a request. Cancelling the call aborts the request."""
        _ = self.server
        check_awake(self._asleep, self._weights.is_lost)
        check_request(request, self._vocabulary, self._max_model_tokens)
        if request.sampling.stop and not self._has_tokenizer:
            raise ModelError("stop strings need a tokenizer, and the model has none")
        return await self._queue.generate(request)

    async def abort(self, ids: Sequence[str] | None = None) -> None:
        _ = self.server
        await self._queue.abort(ids)

    async def pause(self, mode: PauseMode = "abort") -> None:
        server, keeps_cache = self.server, mode == "keep_cache"
        if keeps_cache and self._has_clients:
            raise EnginehouseError(
                f"{self._where}: the cache cannot be kept over a weight update while the server has other clients, who "
                "would get answers computed from old keys and values"
            )
        self._queue.paused = True
        if self._held == "in place":
            await self._hold(keeps_cache)
        if mode == "abort":
            await self._queue.abort()
        if mode in ("abort", "wait"):
            await server.wait_while_alive(self._queue.wait_for_sent())
        await self._hold(keeps_cache)
        self._weights.keeps_cache = keeps_cache

    async def _hold(self, in_place: bool = False) -> None:
        """Stop SGLang, unless it is stopped. Rows that are held in place can also lose their keys and values later."""
        if self._held == "no" or (self._held == "in place" and not in_place):
            await self.server.hold(in_place)
            self._held = "in place" if in_place else "retracted"

    async def resume(self) -> None:
        await self._go_on()
        self._queue.paused = False
        self._queue.send_soon()

    async def _go_on(self) -> None:
        """Have SGLang generate again, if it is awake and has weights."""
        if not self._asleep and not self._weights.is_lost:
            await self.server.go_on()
            self._held = "no"

    async def sleep(self, tags: tuple[str, ...] = ALL) -> None:
        """Free memory; requests of other clients wait until everything is awake and has weights."""
        server, parts = self.server, sleeping(tags) - self._asleep
        if self._queue:
            raise EnginehouseError(f"sglang cannot sleep while {len(self._queue)} requests are in progress")
        if not self._can_sleep:
            raise EnginehouseError(
                f"{self._where}: the sglang server cannot sleep: this run did not start it, or started it without a "
                "memory saver, because no other role takes turns on its devices"
            )
        if not parts:
            return
        before, self._asleep = self._asleep, self._asleep | parts
        try:
            if "weights" in parts:
                self._weights.forget()
            await self._hold()
            await server.release(sorted(parts))
        except BaseException:
            self._asleep = before  # the caller may try again; without weights nothing is generated either way
            raise

    async def wake_up(self, tags: tuple[str, ...] = ALL) -> None:
        server = self.server
        if parts := sleeping(tags) & self._asleep:
            await server.take_back(sorted(parts))
            self._asleep -= parts
            if not self._queue.paused:
                await self._go_on()

    async def start_weight_update(self, update: WeightUpdate) -> None:
        """Prepare to stage a version. Discard an update that was started and not finished."""
        _ = self.server
        check_weights_awake(self._asleep)
        await asyncio.to_thread(self._weights.start, update)

    async def update_weights(self, chunk: WeightChunk) -> None:
        _ = self.server
        await asyncio.to_thread(self._weights.stage, chunk)

    async def finish_weight_update(self, version: int) -> None:
        await self._weights.commit(self.server, self._ranks, version)
        if self._weights.keeps_cache:
            self._queue.note_kept()

    async def abort_weight_update(self) -> None:
        self._weights.discard()

    async def weight_state(self) -> WeightState:
        return await self._weights.state(self.server)

    async def health(self) -> Health:
        await self.server.model()
        running = await self._count_running_tokens()
        counts = self._queue.count_completions()
        return Health(*counts, self._queue.paused, self._weights.version, running_tokens=running)

    async def _count_running_tokens(self) -> int | None:
        """Return the tokens that SGLang's schedulers last had in their caches; None if this server does not say."""
        try:
            cached = [tokens for tokens, _ in await self.server.load_now()]
        except (HTTPStatusError, LookupError):  # another version of a server that a user started
            return None
        return None if None in cached else sum(cached)

    async def shutdown(self) -> None:
        """End the server if this engine started it, else let it continue; open requests raise `SGLangFailed`."""
        server, self._server = self._server, None
        if server is None:
            return
        self._queue.close(SGLangFailed(f"{self._where}: the sglang rollout engine was shut down"))
        if server.process is not None:
            await server.process.end()
        elif self._held != "no":
            await server.go_on()
        self._plain.close()
