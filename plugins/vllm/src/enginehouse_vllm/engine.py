"""vLLM as a rollout engine: its asynchronous engine in this process, its engine core in a process beneath it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import multiprocessing
import multiprocessing.connection
import multiprocessing.process
import os
import secrets
import signal
import threading
from collections.abc import Coroutine, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from enginehouse.engines.model import TOKENIZER_FILES, ModelSpec, ProcessContext, end_ids
from enginehouse.engines.plain_path import PlainPath
from enginehouse.engines.requests import check_request
from enginehouse.engines.rollout import (
    Completion,
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
from enginehouse_vllm.endpoint import OpenAIServer
from enginehouse_vllm.last_words import HERE, last_words
from enginehouse_vllm.options import CPU_KV_CACHE_MIB, SHARE_IN_TURNS, V2_RUNNER, VLLMOptions
from enginehouse_vllm.orphans import LAUNCHER
from enginehouse_vllm.statistics import Statistics
from enginehouse_vllm.weight_updates import VLLMWeights

if TYPE_CHECKING:
    from vllm import AsyncEngineArgs, AsyncLLMEngine, CompletionOutput, RequestOutput

T = TypeVar("T")

SHUTDOWN_SECONDS = 10.0
"""How long vLLM's processes may take to end before they are killed."""
ENDING_SECONDS = 10.0
"""How long a process that is ending may take to be gone: giving its memory back takes time on a busy machine."""

TAKING_TURNS: Mapping[str, Any] = {"enable_sleep_mode": True, "gpu_memory_utilization": SHARE_IN_TURNS}
"""Arguments where others have the GPU in turns. vLLM starts only if so much of it is free; the rest is for what they
cannot give up: contexts of CUDA, buffers of NCCL."""

LOWEST_TEMPERATURE = 0.01
"""vLLM raises a temperature above 0 to this, and says so in a log line only."""

TRUNCATION = "enginehouse_vllm.truncation"
"""Module that vLLM loads in its own processes, by this name."""

CPU_WORKER = "enginehouse_vllm.cpu_worker.SleepingCPUWorker"
"""Class that vLLM makes in its own processes, by this name."""

ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # where the worker's own lines are, which errors quote
    "HF_HUB_OFFLINE": "1",  # models are directories
    "PYTHONSAFEPATH": "1",  # it inspects a model by `python -m`, which imports from the current directory first
}
"""Set before vLLM is imported, where the user's environment says nothing else."""

CPU_ENVIRONMENT = {
    # Without it vLLM's CPU platform puts the model into a third process.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # `enforce_eager` leaves torch.compile on in the sampler, which costs a C++ compiler and seconds at the first call.
    "TORCHDYNAMO_DISABLE": "1",
    # vLLM binds each engine to cores of its own choice: two engines on a machine would choose the same.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # What is noted for logprobs under top-k and top-p has no place in Model Runner V2 (`truncation.py`).
    V2_RUNNER: "0",
    # Threads of several processes on the same cores wait for each other at every barrier: 2 to 20 times slower.
    "OMP_NUM_THREADS": "1",
}


class VLLMFailed(EnginehouseError):
    """vLLM's engine has died, or was never launched: this replica is lost and must be started anew."""


@dataclass(slots=True)
class _Running:
    """A request on its way through vLLM.

    Attributes:
        id: the request's id, not necessarily unique.
        samples: how many completions of it.
        aborted: whether it was told to end before vLLM knew of it.
    """

    id: str
    samples: int
    aborted: bool = False


class VLLMRollout:
    """Implements `enginehouse.engines.rollout.RolloutEngine`, whose docstrings are the contract.

    What it adds to the contract:

    * Requests are batched continuously: one that arrives while others run joins them.
    * `pause("keep")` and a weight update: kept sequences go on with keys and values computed anew from the new weights.
    * Same seed, same tokens "whatever runs beside" holds up to rounding, as in every batching engine.
    * With `top_p` or `top_k` each request costs one more call to vLLM's processes, for the logprobs to be of the whole
      distribution (`truncation.py`). On a GPU that needs vLLM's Model Runner V1: see the option `truncated_logprobs`.
    * Requests of the OpenAI endpoint, where there is one, are held and ended by `pause` like others; `abort`, `health`
      and `metrics` know of those of `generate` alone.
    * A vLLM process that dies ends the replica: requests not finished raise `VLLMFailed`, as does every later call,
      `health` included.
    """

    def __init__(self) -> None:
        self._llm: AsyncLLMEngine | None = None
        self._server: OpenAIServer | None = None
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._statistics = Statistics()
        self._running: dict[str, _Running] = {}  # by the unique name vLLM knows it by
        self._serial = itertools.count()
        self._last_calls: set[asyncio.Future[Any]] = set()  # of requests that were cancelled
        self._paused = False
        self._asleep: frozenset[str] = frozenset()
        self._held: set[str] | None = None  # once paused, the requests that are frozen as they were

    @property
    def native(self) -> AsyncLLMEngine:
        """vLLM's own engine.

        Raises:
            VLLMFailed: it is not launched, or has died.
            WeightsLost: a weight update left it without a whole model.
        """
        if self._llm is None:
            raise VLLMFailed("the vllm rollout engine is not launched")
        if self._llm.errored or not self._lives():  # vLLM finds out later
            raise VLLMFailed(self._death())
        self._weights.check()
        return self._llm

    async def launch(self, model: ModelSpec, options: VLLMOptions, context: ProcessContext) -> Endpoint:
        """Start vLLM and generate one token, so that what vLLM finds out only then is found out here.

        Raises:
            ModelError: vLLM cannot load the model or run it on this device, or it has no tokenizer for the endpoint.
            ConfigError: vLLM does not take an argument of `native`.
        """
        self._where = str(context)
        if model.head != "causal_lm":
            raise ModelError(f"vllm generates text; it cannot serve {model.path!r} with a {model.head!r} head")
        if not Path(model.path, "config.json").is_file():
            raise ModelError(f"{model.path!r} is not a model directory: it holds no config.json")
        if options.openai_endpoint and not _has_tokenizer(model):
            raise ModelError(f"an OpenAI endpoint needs a tokenizer, and there is none in {model.path!r}")
        self._options = options
        self._spec = model
        self._plain = PlainPath(model.path)
        self._can_sleep = context.takes_turns or context.device == "cpu"
        self._weights = VLLMWeights(model, self._where)
        await asyncio.to_thread(self._weights.learn)
        before = set(multiprocessing.active_children())
        try:
            try:
                self._llm, arguments = await asyncio.to_thread(self._start, context)
            finally:
                self._processes = [process for process in multiprocessing.active_children() if process not in before]
            self._died = asyncio.get_running_loop().create_future()
            watched = self._processes, self._died
            threading.Thread(target=_watch, args=watched, name="enginehouse-vllm-life", daemon=True).start()
            llm = self._llm
            self._max_model_tokens = llm.model_config.max_model_len
            self._vocabulary = llm.model_config.get_vocab_size()
            config = llm.model_config
            generation, own = config.try_get_generation_config(), config.hf_text_config
            self._ends = end_ids(generation.get("eos_token_id"), getattr(own, "eos_token_id", None))
            await self._answer(llm.update_weight_version("0"))
            await self.generate(GenerateRequest("launch", [0], SamplingParams(max_tokens=1)))
            if options.openai_endpoint:
                self._server = OpenAIServer("127.0.0.1" if options.openai_endpoint == "loopback" else context.node)
                await self._server.start(llm, arguments, self._drawing)
        except BaseException as error:
            await self.shutdown()
            if not isinstance(error, VLLMFailed):
                raise
            raise ModelError(
                f"{self._where}: vllm loaded {model.path!r} but cannot generate with it on device {context.device}: "
                f"{last_words() or _reason(model, error)}"
            ) from error
        import vllm

        url = None if self._server is None else self._server.url
        return Endpoint(f"vllm {vllm.__version__}", url, self._max_model_tokens)

    def _start(self, context: ProcessContext) -> tuple[AsyncLLMEngine, AsyncEngineArgs]:
        os.environ.update({name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()})
        if context.device == "cpu":
            os.environ.update({name: os.environ.get(name, value) for name, value in CPU_ENVIRONMENT.items()})
        os.environ[LAUNCHER] = str(os.getpid())
        self._exact = os.environ.get(V2_RUNNER) == "0"
        from vllm import AsyncEngineArgs, AsyncLLMEngine

        arguments = self._arguments(context)
        try:
            engine_arguments = AsyncEngineArgs(**arguments)
        except TypeError as error:
            raise ConfigError(f"vllm does not take an argument of `native`: {error}") from error
        try:
            llm = AsyncLLMEngine.from_engine_args(engine_arguments, stat_loggers=[self._statistics.logger])
        except Exception as error:
            why = ""
            if "ngine core" in str(error):  # it died, and knows better
                why = last_words()
            elif "check the logs" in str(error):  # of a model's class that cannot be imported
                why = last_words(process=HERE)
            raise ModelError(
                f"{self._where}: vllm cannot serve {self._spec.path!r}: {why or f'{type(error).__name__}: {error}'}"
            ) from error
        return llm, engine_arguments

    def _arguments(self, context: ProcessContext) -> dict[str, Any]:
        options, spec = self._options, self._spec
        arguments: dict[str, Any] = {
            "model": self._plain.path,
            "dtype": spec.dtype,
            "trust_remote_code": spec.trust_remote_code,
            "seed": context.seed % 2**31,  # NumPy takes no more than 32 bits
            "max_num_seqs": options.max_running,
            "tensor_parallel_size": options.tensor_parallel,
            "logprobs_mode": "processed_logprobs",  # after the temperature: what a trainer computes
            "skip_tokenizer_init": not _has_tokenizer(spec),
            "disable_log_stats": True,  # its own logging; ours is given beside it
            **self._truncation_arguments(),
            "weight_transfer_config": {"backend": "enginehouse"},
        }
        if options.tensor_parallel > 1:
            arguments["distributed_executor_backend"] = "mp"  # inside a Ray worker vLLM would take Ray, on CPU in vain
        if options.max_model_tokens is not None:
            arguments["max_model_len"] = options.max_model_tokens
        if context.device == "cpu":
            arguments["worker_cls"] = CPU_WORKER
            arguments["enforce_eager"] = True
            # A seeded request whose prompt is taken in parts ends vLLM's engine: torch's CPU generators cannot go back.
            arguments["enable_chunked_prefill"] = False
            arguments["kv_cache_memory_bytes"] = CPU_KV_CACHE_MIB << 20
        elif context.takes_turns:
            arguments |= TAKING_TURNS
        if options.kv_cache_mib is not None:
            arguments["kv_cache_memory_bytes"] = options.kv_cache_mib << 20
        return arguments | options.native

    def _truncation_arguments(self) -> dict[str, Any]:
        if not self._exact:
            return {}
        return {
            "logits_processors": [f"{TRUNCATION}:NotesKeptProbability"],
            "worker_extension_cls": f"{TRUNCATION}.WorkerExtension",
        }

    # Generation

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate; cancelling the call ends the request.

        Raises:
            EnginehouseError: the request cannot be served as it stands, for instance its prompt is too long.
            VLLMFailed: vLLM has died.
            WeightsLost: a weight update left it without a whole model.
        """
        llm = self._drawing()
        self._check(request)
        prompt = list(request.prompt_ids)
        name = f"{request.id}/{next(self._serial)}"
        sampling = self._sampling(request, name)
        self._running[name] = _Running(request.id, request.sampling.n)
        try:
            output = await self._run(llm, name, prompt, sampling)
        except BaseException:
            if sampling.extra_args:  # what was noted for it, nobody will ask for
                self._last_calls.add(call := asyncio.ensure_future(self._take_kept(llm, name)))
                call.add_done_callback(self._last_calls.discard)
            raise
        finally:
            del self._running[name]
        result = self._result(request, output)
        if output is not None and sampling.extra_args:
            kept = await self._answer(self._take_kept(llm, name))
            result = _of_the_whole(result, next(filter(None, kept), {}), sampling.seed)
        return result

    def _drawing(self) -> AsyncLLMEngine:
        """vLLM's own engine, if it can draw.

        Raises:
            EnginehouseError: it cannot, as it sleeps or has no weights; and as `native`.
        """
        llm = self.native
        check_awake(self._asleep, self._weights.is_lost)
        return llm

    async def _take_kept(self, llm: AsyncLLMEngine, name: str) -> list[Any]:
        return await llm.collective_rpc("enginehouse_take_kept", args=(name,))

    def _check(self, request: GenerateRequest) -> None:
        check_request(request, self._vocabulary, self._max_model_tokens)
        sampling = request.sampling
        if sampling.max_tokens == 0 and len(request.prompt_ids) == self._max_model_tokens:
            raise EnginehouseError(
                f"request {request.id!r} scores a prompt of {len(request.prompt_ids)} tokens, as many as the model "
                "takes; vllm scores prompts only where one more token has room. Shorten it or raise max_model_tokens."
            )
        if _is_truncated(sampling) and not self._exact and self._options.truncated_logprobs == "exact":
            raise EnginehouseError(
                f"request {request.id!r} has top_p {sampling.top_p:g} and top_k {sampling.top_k}, with which Model "
                "Runner V2 of vllm gives logprobs of the kept tokens only, not of the whole distribution. Use top_p=1 "
                "and top_k=0; or set VLLM_USE_V2_MODEL_RUNNER=0; or, where nobody looks at logprobs, the option "
                "truncated_logprobs=renormalized."
            )
        if 0 < sampling.temperature < LOWEST_TEMPERATURE:
            raise EnginehouseError(
                f"request {request.id!r} has temperature {sampling.temperature:g}, and vllm draws at no lower one than "
                f"{LOWEST_TEMPERATURE:g}. Use that or more, or 0 for greedy."
            )
        if sampling.stop and self.native.tokenizer is None:
            raise ModelError(f"stop strings need a tokenizer, and there is none in {self._spec.path!r}")

    def _sampling(self, request: GenerateRequest, name: str) -> Any:
        from vllm import SamplingParams as Sampling
        from vllm.sampling_params import RequestOutputKind

        wanted = request.sampling
        ends = () if wanted.ignore_eos else self._ends
        seed = None if wanted.seed is None else _spread(wanted.seed)
        extra = None
        if _is_truncated(wanted) and self._exact and self._options.truncated_logprobs == "exact":
            from enginehouse_vllm.truncation import MARK

            extra = {MARK: name}
            seed = secrets.randbits(62) if seed is None else seed  # it tells the samples apart
        return Sampling(
            n=wanted.n if wanted.temperature > 0 else 1,  # vLLM refuses to draw one and the same again
            max_tokens=max(wanted.max_tokens, 1),  # vLLM cannot score a prompt alone; the token is dropped
            temperature=wanted.temperature,
            top_p=wanted.top_p,
            top_k=wanted.top_k,
            seed=seed,
            extra_args=extra,
            ignore_eos=True,  # the model's ends are among the stop tokens, so that they are the same for all engines
            stop_token_ids=[*ends, *wanted.stop_token_ids],
            stop=list(wanted.stop),
            detokenize=bool(wanted.stop),
            logprobs=0,
            prompt_logprobs=0 if wanted.prompt_logprobs else None,
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    async def _run(self, llm: AsyncLLMEngine, name: str, prompt: list[int], sampling: Any) -> RequestOutput | None:
        """vLLM's output; None where the request was aborted before vLLM knew of it."""
        from vllm.inputs import tokens_input
        from vllm.v1.engine.exceptions import EngineGenerateError

        async def last() -> RequestOutput | None:
            if self._running[name].aborted:
                return None
            outputs = [one async for one in llm.generate(tokens_input(prompt), sampling, name)]
            return outputs[-1]

        try:
            return await self._answer(last())
        except EngineGenerateError as error:
            raise EnginehouseError(f"{self._where}: vllm failed at request {name}: {error.__cause__}") from error

    def _result(self, request: GenerateRequest, output: RequestOutput | None) -> GenerateResult:
        served = self._weights.version
        if output is None:
            return GenerateResult(request.id, (Completion((), (), "abort", served, served),) * request.sampling.n)
        prompt_logprobs = None
        if request.sampling.prompt_logprobs and output.prompt_logprobs is not None:
            prompt_logprobs = [0.0, *_first_of_each(output.prompt_logprobs)]
        completions = [self._completion(request, part, served) for part in output.outputs]
        if len(completions) == 1:  # greedy samples are all the same
            completions *= request.sampling.n
        return GenerateResult(request.id, tuple(completions), prompt_logprobs)

    def _completion(self, request: GenerateRequest, part: CompletionOutput, served: int) -> Completion:
        reason = part.finish_reason
        if reason not in ("stop", "length", "abort"):
            raise EnginehouseError(f"{self._where}: vllm ended request {request.id!r} with {reason!r}")
        if request.sampling.max_tokens == 0:
            return Completion((), (), "abort" if reason == "abort" else "length", served, served)
        versions = [int(span.version) for span in part.weight_versions or ()] or [served]
        return Completion(list(part.token_ids), _first_of_each(part.logprobs), reason, versions[0], versions[-1])

    # Control

    async def abort(self, ids: Sequence[str] | None = None) -> None:
        """See the protocol; requests that wait are ended too, with no tokens."""
        llm = self.native
        names = [name for name, running in self._running.items() if ids is None or running.id in ids]
        for name in names:
            self._running[name].aborted = True
        if names:
            await self._answer(llm.abort(names))

    async def pause(self, mode: PauseMode = "abort") -> None:
        """See the protocol."""
        llm = self.native
        self._paused = True
        before = set(self._running)
        if self._asleep:  # nothing is in vLLM, and nothing comes
            self._held = set()
            return
        await self._answer(llm.pause_generation(mode=mode, clear_cache=False))
        self._held = before if mode == "keep" else set()

    async def resume(self) -> None:
        """See the protocol."""
        llm = self.native
        if not self._asleep:
            await self._answer(llm.resume_generation())
        self._paused, self._held = False, None

    async def sleep(self, tags: tuple[str, ...] = ALL) -> None:
        """See the protocol; clients of the endpoint get what they have, and until all is awake a 503."""
        llm, asleep = self.native, self._asleep | sleeping(tags)
        if self._running:
            raise EnginehouseError(f"vllm cannot sleep while {len(self._running)} requests are under way")
        if not self._can_sleep:
            raise EnginehouseError(f"{self._where}: vllm was started without its sleep mode, as nobody takes turns")
        before, self._asleep = self._asleep, asleep
        new = _asleep_in_vllm(asleep) - _asleep_in_vllm(before)
        try:
            if "weights" in new:
                self._weights.forget()
                await self._answer(llm.sleep(level=2))  # which aborts what clients asked for
            elif new:
                await self._answer(llm.pause_generation(mode="abort"))
                await self._answer(llm.release_kv_cache_memory())
        except BaseException:
            self._asleep = before  # it may be asked again; without weights it draws nothing either way
            raise

    async def wake_up(self, tags: tuple[str, ...] = ALL) -> None:
        """See the protocol."""
        llm, asleep = self.native, self._asleep - sleeping(tags)
        if waking := _asleep_in_vllm(self._asleep) - _asleep_in_vllm(asleep):
            await self._answer(llm.wake_up(sorted(waking)))
            if self._paused and not asleep:  # vLLM goes on by itself, once all of it is awake
                await self._answer(llm.pause_generation(mode="abort", clear_cache=False))
        self._asleep = asleep

    # Weights

    async def start_weight_update(self, update: WeightUpdate) -> None:
        """See the protocol. An update that was started and not finished is thrown away."""
        _ = self.native
        check_weights_awake(self._asleep)
        await asyncio.to_thread(self._weights.start, update)

    async def update_weights(self, chunk: WeightChunk) -> None:
        """See the protocol."""
        _ = self.native
        await asyncio.to_thread(self._weights.stage, chunk)

    async def finish_weight_update(self, version: int) -> None:
        """See the protocol."""
        await self._answer(self._weights.commit(self.native, version))

    async def abort_weight_update(self) -> None:
        """See the protocol."""
        self._weights.discard()

    async def weight_state(self) -> WeightState:
        """See the protocol."""
        return await self._answer(self._weights.state(self.native))

    # Life

    async def health(self) -> Health:
        """See the protocol.

        Raises:
            VLLMFailed: vLLM has died.
            WeightsLost: a weight update left it without a whole model.
        """
        _ = self.native
        running, waiting = self._load()
        return Health(running, waiting, self._paused, self._weights.version, self._statistics.figures())

    def metrics(self) -> Mapping[str, float]:
        """vLLM's own figures: `running` and `waiting` completions, and as of its last step `kv_cache_usage` and
        `prefix_cache_hit_rate`, both 0 to 1, the latter of the prompt tokens since the launch."""
        running, waiting = self._load()
        return {"running": float(running), "waiting": float(waiting), **self._statistics.figures()}

    def _load(self) -> tuple[int, int]:
        """Completions running, and waiting. vLLM says how many were in its last step, so not that they have ended."""
        present = sum(request.samples for request in self._running.values())
        begun = {name for name in self._running if self._held is None or name in self._held}
        running = min(self._statistics.running, sum(self._running[name].samples for name in begun))
        return running, present - running

    def processes(self) -> list[int]:
        """Ids of vLLM's processes that were started from here and run; those have workers of their own with
        `tensor_parallel`."""
        return [process.pid for process in self._processes if process.pid is not None and process.is_alive()]

    async def shutdown(self) -> None:
        """End the endpoint and vLLM's processes; what runs returns as aborted."""
        llm, self._llm = self._llm, None
        if llm is not None and not llm.errored:
            for running in self._running.values():
                running.aborted = True
            await llm.abort(list(self._running))
        if self._server is not None:
            await self._server.end()
        if llm is not None and llm.output_handler is not None:
            llm.output_handler.cancel()  # else it logs the end of the engine core as a failure
        await asyncio.to_thread(self._end, llm)

    def _end(self, llm: AsyncLLMEngine | None) -> None:
        if llm is not None:
            llm.shutdown(timeout=SHUTDOWN_SECONDS)
        for process in self._processes:
            process.join(SHUTDOWN_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()
        self._plain.close()

    async def _answer(self, call: Coroutine[Any, Any, T]) -> T:
        """What vLLM answers to a call.

        Raises:
            VLLMFailed: vLLM is dead, or dies before it answers.
        """
        from vllm.v1.engine.exceptions import EngineDeadError

        task = asyncio.ensure_future(call)
        try:
            await asyncio.wait({task, self._died}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():  # vLLM itself waits for ever for the answer of a dead process
                raise VLLMFailed(self._death())
            return task.result()
        except EngineDeadError as error:
            raise VLLMFailed(self._death()) from error
        except Exception as error:  # a call that meets a process which is just ending says so in other words
            if self._lives():
                raise
            raise VLLMFailed(self._death()) from error
        finally:
            task.cancel()

    def _lives(self) -> bool:
        """Whether vLLM's processes run. One that ends closes its files, which `_died` tells, before it can be asked."""
        return not self._died.done() and all(process.is_alive() for process in self._processes)

    def _death(self) -> str:
        """What is known of vLLM's end."""
        for process in self._processes:
            if self._died.done():  # how it ended is known a moment after that it did
                process.join(ENDING_SECONDS)
        ended = [
            f"process {process.pid} {_ending(process.exitcode)}"
            for process in self._processes
            if process.exitcode is not None
        ]
        known = f" ({', '.join(ended)})" if ended else ""
        return f"{self._where}: vllm's engine core has died{known}: {last_words() or 'its log may say why'}"


def _reason(model: ModelSpec, error: VLLMFailed) -> str:
    """Why vLLM cannot generate, where its log does not say."""
    if "SIGILL" not in str(error):
        return str(error)
    return (
        f"this build of vllm computes {model.dtype} with instructions that this CPU does not carry out (SIGILL); set "
        "model.dtype to another"
    )


def _watch(processes: Sequence[multiprocessing.process.BaseProcess], died: asyncio.Future[None]) -> None:
    """Wait for the first of some processes to end, and say so in the event loop of `died`."""

    def say() -> None:
        if not died.done():
            died.set_result(None)

    if not processes:  # another way of vLLM's to run its engine core: it tells of its death itself, or it does not
        return
    multiprocessing.connection.wait([process.sentinel for process in processes])
    for process in processes:
        process.join(0.1)  # so that its exit code is known
    with contextlib.suppress(RuntimeError):  # the event loop may be closed
        died.get_loop().call_soon_threadsafe(say)


def _asleep_in_vllm(asleep: Set[str]) -> frozenset[str]:
    """What sleeps in vLLM where parts do here: it cannot let its weights sleep and keep its cache."""
    return frozenset({"weights", "kv_cache"} if "weights" in asleep else asleep)


def _ending(exit_code: int) -> str:
    return f"was ended by signal {signal.Signals(-exit_code).name}" if exit_code < 0 else f"ended with code {exit_code}"


def _first_of_each(logprobs: Any) -> list[float]:
    """The logprob of the token itself at each position that has one; vLLM puts it before those of other tokens."""
    if logprobs is None:
        return []
    values = logprobs.logprobs
    return [
        values[begin] for begin, end in zip(logprobs.start_indices, logprobs.end_indices, strict=True) if begin < end
    ]


def _has_tokenizer(model: ModelSpec) -> bool:
    return any(any(Path(model.path).glob(pattern)) for pattern in TOKENIZER_FILES)


def _is_truncated(sampling: SamplingParams) -> bool:
    return sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k > 0)


def _of_the_whole(result: GenerateResult, kept: Mapping[str, Sequence[float]], seed: int) -> GenerateResult:
    """Logprobs of the whole distribution from those of the kept tokens.

    Args:
        result: with logprobs of the kept tokens.
        kept: logarithm of the kept tokens' probability at each token, by the seed of each sample.
        seed: of the first sample; each further one has the next number.
    """
    completions = []
    for index, completion in enumerate(result.completions):
        masses = kept.get(str(seed + index), ())[: len(completion.logprobs)]
        logprobs = [logprob + mass for logprob, mass in zip(completion.logprobs, masses, strict=True)]
        completions.append(replace(completion, logprobs=logprobs))
    return replace(result, completions=tuple(completions))


def _spread(seed: int) -> int:
    """A seed of 62 bits. vLLM numbers the seeds of a request's samples from it: neighbours must not meet."""
    return int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=8).digest(), "little") >> 2
