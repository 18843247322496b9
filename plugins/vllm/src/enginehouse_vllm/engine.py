"""vLLM as a rollout engine: its asynchronous engine in this process, its engine core in child processes."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
from collections.abc import Coroutine, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from enginehouse.engines.model import ModelSpec, ProcessContext
from enginehouse.engines.plain_path import PlainPath
from enginehouse.engines.rollout import Endpoint, GenerateRequest, GenerateResult, Health, PauseMode, SamplingParams
from enginehouse.engines.sleep import check_awake, check_weights_awake, sleeping
from enginehouse.engines.train import ALL
from enginehouse.engines.weights import WeightChunk, WeightState, WeightUpdate
from enginehouse.errors import EnginehouseError, ModelError
from enginehouse_vllm.core_processes import SHUTDOWN_SECONDS, CoreProcesses, VLLMFailed
from enginehouse_vllm.endpoint import OpenAIServer
from enginehouse_vllm.last_words import last_words
from enginehouse_vllm.options import VLLMOptions
from enginehouse_vllm.served_adapter import AdaptedEngine, adapter_request
from enginehouse_vllm.starting import engine_arguments, has_exact_logprobs, has_tokenizer, set_environment, start_engine
from enginehouse_vllm.statistics import Statistics
from enginehouse_vllm.translation import RequestTranslator, add_kept_probability
from enginehouse_vllm.weight_updates import VLLMWeights

if TYPE_CHECKING:
    from vllm import AsyncLLMEngine, RequestOutput

T = TypeVar("T")


@dataclass(slots=True)
class RunningRequest:
    """A request without a result yet. Its `id` need not be unique, and vLLM may not know an aborted request yet.

    `ready` is set once the request may be sent to vLLM: at once, or after a pause. `version` is the weight version that
    was served when it was sent; `kept` is True if its keys and values were kept over an update.
    """

    id: str
    samples: int
    aborted: bool = False
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    version: int | None = None
    kept: bool = False

    def abort(self) -> None:
        """Have the request end as aborted, even if it waits for the end of a pause."""
        self.aborted = True
        self.ready.set()


class VLLMRollout:
    """Implements `enginehouse.engines.rollout.RolloutEngine`, whose docstrings are the contract.

    In addition:

    * Requests are batched continuously: one that arrives while others run joins them.
    * Requests that arrive while paused wait here, so that the version of their cached keys and values is the new one.
    * The same seed gives the same tokens whatever else runs, up to rounding, as in every batching engine.
    * With `top_p` or `top_k` each request costs another call to vLLM's processes, which turns its logprobs into
      logprobs of the whole distribution (`truncation.py`). On a GPU this needs vLLM's Model Runner V1: see the option
      `truncated_logprobs`.
    * `pause` also holds and ends requests of the OpenAI endpoint; `abort`, `health` and `metrics` only know requests
      of `generate`.
    * A vLLM process that dies ends the replica: unfinished requests and every later call raise `VLLMFailed`.
    * Every method that needs vLLM raises `WeightsLost` if a weight update left it without a complete model.
    """

    def __init__(self) -> None:
        self._llm: AsyncLLMEngine | None = None
        self._core: CoreProcesses | None = None
        self._server: OpenAIServer | None = None
        self._statistics = Statistics()
        self._running: dict[str, RunningRequest] = {}  # by the unique name that vLLM gets
        self._serial = itertools.count()
        self._last_calls: set[asyncio.Future[Any]] = set()  # of requests that were cancelled
        self._paused = False
        self._asleep: frozenset[str] = frozenset()
        self._held: set[str] | None = None  # once paused, the requests that are frozen as they were

    @property
    def native(self) -> AsyncLLMEngine:
        """vLLM's own engine. Raises `VLLMFailed` if it is not alive, or `WeightsLost` if it has no complete model."""
        if self._llm is None or self._core is None:
            raise VLLMFailed("the vllm rollout engine is not launched")
        if self._llm.errored or not self._core.are_alive():  # vLLM finds out later
            raise VLLMFailed(self._core.describe_death())
        self._weights.check()
        return self._llm

    async def launch(self, model: ModelSpec, options: VLLMOptions, context: ProcessContext) -> Endpoint:
        """Start vLLM and generate one token, because some errors only occur then.

        Raises:
            ModelError: vLLM cannot load the model or run it on this device, or the endpoint has no tokenizer.
            ConfigError: vLLM rejects an argument of `native`.
        """
        self._where = str(context)
        if model.head != "causal_lm":
            raise ModelError(f"vllm generates text; it cannot serve {model.path!r} with a {model.head!r} head")
        if not Path(model.path, "config.json").is_file():
            raise ModelError(f"{model.path!r} is not a model directory: it holds no config.json")
        if options.openai_endpoint and not has_tokenizer(model):
            raise ModelError(f"an OpenAI endpoint needs a tokenizer, and there is none in {model.path!r}")
        options.refuse_adapter(model, context.device)
        self._can_sleep = context.takes_turns or context.device == "cpu"
        self._weights = VLLMWeights(model, self._where)
        await asyncio.to_thread(self._weights.learn)
        set_environment(context.device)
        self._translator = RequestTranslator(model, options, self._where, has_exact_logprobs())
        self._plain = PlainPath(model.path)
        self._adapter = None if model.adapter is None else adapter_request()
        arguments = engine_arguments(self._plain.path, model, options, context, self._weights.parameters)
        before = set(multiprocessing.active_children())
        try:
            try:
                llm, engine_args = await asyncio.to_thread(
                    start_engine, arguments, self._statistics.make_logger, model, self._where
                )
                self._llm = llm
            finally:
                started = [process for process in multiprocessing.active_children() if process not in before]
                self._core = CoreProcesses(started, self._where)
            self._translator.learn(llm.model_config)
            await self._wait_for(llm.update_weight_version("0"))
            if self._adapter is not None:
                await self._wait_for(self._weights.clear_adapter(llm))
            await self.generate(GenerateRequest("launch", [0], SamplingParams(max_tokens=1)))
            if options.openai_endpoint:
                self._server = OpenAIServer("127.0.0.1" if options.openai_endpoint == "loopback" else context.node)
                served: Any = llm if self._adapter is None else AdaptedEngine(llm)
                await self._server.start(served, engine_args, self._get_awake_engine)
        except BaseException as error:
            await self.shutdown()
            if not isinstance(error, VLLMFailed):
                raise
            raise ModelError(
                f"{self._where}: vllm loaded {model.path!r} but cannot generate with it on device {context.device}: "
                f"{last_words() or _explain(error, model)}"
            ) from error
        import vllm

        url = None if self._server is None else self._server.url
        return Endpoint(f"vllm {vllm.__version__}", url, self._translator.max_model_tokens)

    async def _wait_for(self, call: Coroutine[Any, Any, T]) -> T:
        assert self._core is not None
        return await self._core.wait_for(call)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate the completions of a request. Cancelling the call aborts the request."""
        llm = self._get_awake_engine()
        self._translator.check(request, llm)
        name = f"{request.id}/{next(self._serial)}"
        sampling = self._translator.build_sampling(request, name)
        self._running[name] = running = RunningRequest(request.id, request.sampling.n)
        if not self._paused:
            running.ready.set()
        try:
            output = await self._run(llm, name, list(request.prompt_ids), sampling)
        except BaseException:
            if sampling.extra_args:  # drop the request's notes, which nobody else collects
                self._last_calls.add(call := asyncio.ensure_future(_take_kept(llm, name)))
                call.add_done_callback(self._last_calls.discard)
            raise
        finally:
            del self._running[name]
        cached = running.version if running.kept else None
        result = self._translator.build_result(request, output, self._weights.version, cached)
        if output is not None and sampling.extra_args:
            notes = await self._wait_for(_take_kept(llm, name))
            result = add_kept_probability(result, next(filter(None, notes), {}), sampling.seed)
        return result

    def _get_awake_engine(self) -> AsyncLLMEngine:
        """Return vLLM's own engine; raises `EnginehouseError` if it sleeps or has no weights."""
        llm = self.native
        check_awake(self._asleep, self._weights.is_lost)
        return llm

    async def _run(self, llm: AsyncLLMEngine, name: str, prompt: list[int], sampling: Any) -> RequestOutput | None:
        """Return vLLM's output, or None if the request was aborted before vLLM knew of it."""
        from vllm.inputs import tokens_input
        from vllm.v1.engine.exceptions import EngineGenerateError

        async def generate() -> RequestOutput | None:
            running = self._running[name]
            await running.ready.wait()
            if running.aborted:
                return None
            self._weights.check()
            running.version = self._weights.version
            inputs = tokens_input(prompt, cache_salt=str(running.version))
            answers = llm.generate(inputs, sampling, name, lora_request=self._adapter)
            outputs = [output async for output in answers]
            return outputs[-1]

        try:
            return await self._wait_for(generate())
        except EngineGenerateError as error:
            raise EnginehouseError(f"{self._where}: vllm failed at request {name}: {error.__cause__}") from error

    async def abort(self, ids: Sequence[str] | None = None) -> None:
        llm = self.native
        names = [name for name, running in self._running.items() if ids is None or running.id in ids]
        for name in names:
            self._running[name].abort()
        if names:
            await self._wait_for(llm.abort(names))

    async def pause(self, mode: PauseMode = "abort") -> None:
        llm = self.native
        if mode == "keep_cache" and self._server is not None:
            raise EnginehouseError(
                f"{self._where}: the cache cannot be kept over a weight update while there is an OpenAI endpoint: its "
                "clients would get answers computed from old keys and values"
            )
        self._paused = True
        before = set(self._running)
        self._weights.keeps_cache = mode == "keep_cache"
        if self._asleep:  # nothing is in vLLM, and nothing comes
            self._held = set()
            return
        kept = mode in ("keep", "keep_cache")
        await self._wait_for(llm.pause_generation(mode="keep" if kept else mode, clear_cache=False))
        self._held = before if kept else set()

    async def resume(self) -> None:
        llm = self.native
        if not self._asleep:
            await self._wait_for(llm.resume_generation())
        self._paused, self._held = False, None
        self._release()

    def _release(self) -> None:
        """Let waiting requests go on."""
        for running in self._running.values():
            running.ready.set()

    async def sleep(self, tags: tuple[str, ...] = ALL) -> None:
        """Free memory. Clients of the endpoint get what is generated so far, and a 503 until everything is awake."""
        llm, asleep = self.native, self._asleep | sleeping(tags)
        if self._running:
            raise EnginehouseError(f"vllm cannot sleep while {len(self._running)} requests are in progress")
        if not self._can_sleep:
            raise EnginehouseError(
                f"{self._where}: vllm cannot sleep, because it was started without its sleep mode: no other role takes "
                "turns on its devices"
            )
        before, self._asleep = self._asleep, asleep
        parts = _asleep_in_vllm(asleep) - _asleep_in_vllm(before)
        try:
            if "weights" in parts:
                self._weights.forget()
                await self._wait_for(llm.sleep(level=2))  # it aborts the requests of clients
            elif parts:
                await self._wait_for(llm.pause_generation(mode="abort"))
                await self._wait_for(llm.release_kv_cache_memory())
        except BaseException:
            self._asleep = before  # the caller may try again; without weights nothing is generated either way
            raise

    async def wake_up(self, tags: tuple[str, ...] = ALL) -> None:
        llm, asleep = self.native, self._asleep - sleeping(tags)
        if parts := _asleep_in_vllm(self._asleep) - _asleep_in_vllm(asleep):
            await self._wait_for(llm.wake_up(sorted(parts)))
            if self._paused and not asleep:  # vLLM resumes by itself once everything is awake
                await self._wait_for(llm.pause_generation(mode="abort", clear_cache=False))
        self._asleep = asleep

    async def start_weight_update(self, update: WeightUpdate) -> None:
        """Prepare to stage a version. Discard an update that was started and not finished."""
        _ = self.native
        check_weights_awake(self._asleep)
        await asyncio.to_thread(self._weights.start, update)

    async def update_weights(self, chunk: WeightChunk) -> None:
        _ = self.native
        await asyncio.to_thread(self._weights.stage, chunk)

    async def finish_weight_update(self, version: int) -> None:
        try:
            await self._wait_for(self._weights.commit(self.native, version))
        finally:
            if self._weights.is_lost:  # `resume` cannot be called any more
                self._release()
        for running in self._running.values():
            running.kept |= self._weights.keeps_cache and running.version is not None

    async def abort_weight_update(self) -> None:
        self._weights.discard()

    async def weight_state(self) -> WeightState:
        return await self._wait_for(self._weights.state(self.native))

    async def health(self) -> Health:
        begun = [state for state in self.native.output_processor.request_states.values() if not state.is_prefilling]
        tokens = sum(state.prompt_len + state.detokenizer.num_output_tokens() for state in begun)
        figures = self._statistics.figures()
        return Health(*self._count_completions(), self._paused, self._weights.version, figures, tokens)

    def metrics(self) -> Mapping[str, float]:
        """Return vLLM's own metrics.

        `running` and `waiting` are numbers of completions. `kv_cache_usage` is the used fraction of the KV cache in
        vLLM's last step. `prefix_cache_hit_rate` is the fraction of the prompt tokens since the launch that the prefix
        cache held.
        """
        running, waiting = self._count_completions()
        return {"running": float(running), "waiting": float(waiting), **self._statistics.figures()}

    def _count_completions(self) -> tuple[int, int]:
        """Return how many completions run and wait. vLLM reports the completions of its last step, some of which may
        have ended."""
        present = sum(request.samples for request in self._running.values())
        begun = {name for name in self._running if self._held is None or name in self._held}
        running = min(self._statistics.running, sum(self._running[name].samples for name in begun))
        return running, present - running

    def processes(self) -> list[int]:
        """Return ids of vLLM's running processes. With `tensor_parallel` they have children, which are not listed."""
        return [] if self._core is None else self._core.pids

    async def shutdown(self) -> None:
        """End the endpoint and vLLM's processes; open requests return as aborted."""
        llm, self._llm = self._llm, None
        for running in self._running.values():
            running.abort()
        if llm is not None and not llm.errored:
            await llm.abort(list(self._running))
        if self._server is not None:
            await self._server.end()
        if llm is not None and llm.output_handler is not None:
            llm.output_handler.cancel()  # else it logs the end of the engine core as a failure
        if self._core is not None:
            await asyncio.to_thread(self._end, llm, self._core)

    def _end(self, llm: AsyncLLMEngine | None, core: CoreProcesses) -> None:
        if llm is not None:
            llm.shutdown(timeout=SHUTDOWN_SECONDS)
        core.end()
        self._plain.close()


async def _take_kept(llm: AsyncLLMEngine, name: str) -> list[Any]:
    return await llm.collective_rpc("enginehouse_take_kept", args=(name,))


def _explain(error: VLLMFailed, model: ModelSpec) -> str:
    """Return the message of the error, or an explanation of SIGILL, which vLLM's log does not explain."""
    if "SIGILL" not in str(error):
        return str(error)
    return (
        f"this build of vllm computes {model.dtype} with instructions that this CPU does not support (SIGILL); set "
        "model.dtype to another dtype"
    )


def _asleep_in_vllm(asleep: Set[str]) -> frozenset[str]:
    """Return the parts that must sleep in vLLM so that the parts `asleep` sleep: vLLM's weights cannot sleep without
    its cache."""
    return frozenset({"weights", "kv_cache"} if "weights" in asleep else asleep)
