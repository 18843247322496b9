"""Workers: `TrainWorker` holds one rank of a training engine, `RolloutWorker` one replica of a rollout engine.

A worker adds the parts that all engines share. It builds an engine from its record, splits batches into mini-batches,
converts batches to requests and back, and takes part in weight updates. Actor, reference, critic and reward model are
`TrainWorker`s.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import platform
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from typing import Any, TypeVar

import numpy as np
import torch

from enginehouse.controller import Worker, register
from enginehouse.controller.launchers.failure import CallSite, WorkerFailure
from enginehouse.data import Batch, Ragged
from enginehouse.engines.mesh import Mesh
from enginehouse.engines.model import ModelSpec
from enginehouse.engines.progress import note_file_progress, note_progress
from enginehouse.engines.rollout import Health, PauseMode, RolloutEngine, SamplingParams
from enginehouse.engines.sleep import sleeping
from enginehouse.engines.train import ALL, LossSpec, Max, Mean, Metrics, Outputs, TrainEngine, merge_metrics
from enginehouse.engines.weights import (
    ArrivedSums,
    LendingSession,
    Loan,
    ParamMeta,
    TransferPlan,
    TransportSession,
    WeightSource,
    WeightState,
    WeightSyncError,
)
from enginehouse.errors import EnginehouseError
from enginehouse.fleet.generation import make_requests, make_seeded_requests
from enginehouse.fleet.request_batches import AnswerBatch, RequestBatch, assemble
from enginehouse.fleet.request_queue import VerifiedRequestQueue
from enginehouse.plugin import Backend, PluginError, capabilities, plugins, resolve
from enginehouse.plugin.references import find_missing_methods
from enginehouse.plugin.requirements import installed_versions
from enginehouse.roles.file_scores import FileScores, score_files
from enginehouse.roles.footprint import freed_bytes, held_bytes
from enginehouse.roles.profiles import Profile, begin_profile, end_profile, stop_profile
from enginehouse.roles.sequence_scores import VALUES, append_end
from enginehouse.runtimes import CURRENT, RUNTIME_VARIABLE
from enginehouse.weights.receiver import Switched, WeightReceiver
from enginehouse.weights.transports.ends import address_of, weights_for
from enginehouse.weights.transports.lookup import load_transport

log = logging.getLogger(__name__)

Part = TypeVar("Part")

TRAINED = "trained"
"""Column bool `(rows,)` of a training batch: False if the loss must not count the row's tokens."""


class TrainWorker(Worker):
    """One rank of a training engine.

    Args:
        options: options of the engine, which its options class checks.
    """

    def __init__(self, backend: str, model: ModelSpec, options: dict[str, Any] | None = None):
        self._record = plugins().get("train", backend)
        checked = resolve(self._record.options)(**(options or {}))
        self.engine: TrainEngine = _load_engine_class(self._record, TrainEngine)()
        self.engine.setup(model, checked, self.context)
        self._session: TransportSession | None = None
        self._lends = self._sends_adapter = False
        self._loan = Loan()

    @property
    def mesh(self) -> Mesh:
        """Mesh of the engine, by which the controller splits batches over the ranks."""
        return self.engine.mesh

    @register(dispatch="dp")
    def forward(self, batch: Batch, outputs: Outputs, prefix: str = "") -> Batch | None:
        """Call `TrainEngine.forward`, and put `prefix` before the names of its columns."""
        return _prefix_columns(self.engine.forward(batch, outputs), prefix)

    @register(dispatch="dp")
    def forward_base(self, batch: Batch, outputs: Outputs, prefix: str = "") -> Batch | None:
        """Compute `forward` without adapters; see `TrainsAdapters.forward_base`."""
        return _prefix_columns(self._require(capabilities.LORA).forward_base(batch, outputs), prefix)

    @register(dispatch="dp")
    def score_rows(self, batch: Batch) -> Batch | None:
        """Score the sequences `input_ids` with a value head, as `score` float32 `(rows,)`."""
        scored = self.engine.forward(append_end(batch), VALUES)
        if scored is None:
            return None
        values = scored.ragged("values")
        return Batch({"score": values.values[values.offsets[1:] - 1]})

    @register(dispatch="dp", collect="merge")
    def update(
        self, batch: Batch, loss: LossSpec, minibatches: int = 1, epochs: int = 1, first_loss: LossSpec | None = None
    ) -> dict[str, float | Mean | Max]:
        """Train on a batch: `epochs` passes of `minibatches` optimizer steps each.

        All ranks take the same number of steps. A rank without rows of a mini-batch takes part with an empty batch.

        Args:
            batch: `input_ids`, `loss_mask` and the columns that the loss reads; `fill_defaults` adds some of them. With
                several mini-batches also `minibatch` int64 `(rows, epochs)`, see `enginehouse_rl.steps.minibatches`.
            first_loss: loss for the first optimizer step, for example to measure the weights before they change. None:
                the first step uses `loss` too.

        Returns:
            The loss's means over all steps; the optimizer's metrics (`grad_norm`, `lr`, `skipped`), averaged over the
            steps; `optimizer_steps`; and `busy/update`, seconds in this method, averaged over ranks.
        """
        begun = time.perf_counter()
        self._loan.end()
        batch = fill_defaults(batch)
        parts: list[Metrics] = []
        steps: list[Metrics] = []
        for epoch in range(epochs):
            for number in range(minibatches):
                rows = batch if minibatches == 1 else batch.take(batch["minibatch"][:, epoch] == number)
                step_loss = first_loss if first_loss is not None and not steps else loss
                parts.append(self.engine.forward_backward(rows, step_loss))
                steps.append(self.engine.optim_step())
                note_progress()
        figures = {
            name: sum(_to_number(step[name]) for step in steps) / len(steps) for name in (steps[0] if steps else ())
        }
        return {
            **merge_metrics(parts),
            **figures,
            "optimizer_steps": float(len(steps)),
            "busy/update": Mean(time.perf_counter() - begun, 1.0),
        }

    @register(dispatch="rank_zero")
    def weight_metadata(self, adapter: bool = False) -> list[ParamMeta]:
        """Return the metadata of the engine's weights, with their Hugging Face names, or of its adapters alone."""
        return self._weight_source(adapter).metadata()

    def _weight_source(self, adapter: bool) -> WeightSource:
        return self._require(capabilities.ADAPTER_UPDATES).adapter_source() if adapter else self.engine.weight_source()

    @register
    def connect_weights(self, plan: TransferPlan) -> str:
        """Open this rank's side of a weight transport, and return its address. Close a side that is open already."""
        self.close_weights()
        host = plan.host or self.context.node
        plan = dataclasses.replace(plan, host=host)
        self._session = load_transport(plan.transport).connect(plan, "send", self.context.rank)
        self._lends = plan.lends and capabilities.LENT_WEIGHTS in self._record.capabilities
        self._sends_adapter = plan.adapter
        return address_of(self._session, host)

    @register
    def send_weights(self, version: int, deadline_seconds: float) -> dict[str, str]:
        """Send the current weights as `version`.

        Returns:
            Checksums of the parameters, or of their parts, as they were sent; empty on a rank that does not send.
        """
        if self._session is None:
            raise WeightSyncError(f"{self.context} was asked for weights before a transport was connected")
        if self._lends and isinstance(self._session, LendingSession):
            self._loan = Loan() if self._loan.is_over else self._loan
            self._session.loan = self._loan
        source = self._weight_source(self._sends_adapter)
        return self._session.send(version, weights_for(self._session, source), deadline_seconds)

    @register
    async def abort_weights(self, version: int) -> None:
        """Make a current or later `send_weights` of this version fail."""
        if self._session is not None:
            self._session.abort(version)

    @register
    def close_weights(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()

    @register
    def onload(self, tags: tuple[str, ...] = ALL) -> None:
        """Load offloaded state; see `OffloadsState.onload`."""
        self._require(capabilities.OFFLOAD).onload(tags)

    @register
    def offload(self, tags: tuple[str, ...] = ALL) -> int | None:
        """Move state to host memory; see `OffloadsState.offload`. Returns the freed bytes, or None if unknown."""
        before = held_bytes(self.context.device)
        self._loan.end()
        self._require(capabilities.OFFLOAD).offload(tags)
        return freed_bytes(self.context.device, before)

    @register
    def save(self, path: str, what: tuple[str, ...] = ALL) -> None:
        """Write a checkpoint; see `TrainEngine.save`."""
        with note_file_progress():
            self.engine.save(path, what)

    @register
    def save_in_background(self, path: str, what: tuple[str, ...] = ALL) -> None:
        """Copy the state, and write it in the background; see `SavesInBackground`."""
        self._require(capabilities.BACKGROUND_SAVE).save_in_background(path, what)

    @register
    def finish_save(self) -> None:
        """Wait for a background save; see `SavesInBackground`."""
        with note_file_progress():
            self._require(capabilities.BACKGROUND_SAVE).finish_save()

    @register
    def load(self, path: str, what: tuple[str, ...] = ALL) -> None:
        """Load a checkpoint; see `TrainEngine.load`."""
        self._loan.end()
        with note_file_progress():
            self.engine.load(path, what)

    @register
    def export_hf(self, path: str) -> None:
        """Write the model as a Hugging Face directory; see `TrainEngine.export_hf`."""
        with note_file_progress():
            self.engine.export_hf(path)

    @register
    def export_adapter(self, path: str) -> None:
        """Write only the adapters; see `TrainsAdapters.export_adapter`."""
        with note_file_progress():
            self._require(capabilities.LORA).export_adapter(path)

    @register(dispatch="rank_zero")
    def score_files(self, path: str, spec: ModelSpec) -> FileScores:
        """Score a row with transformers from the files of `export_hf` or `export_adapter`; see `compare_export`."""
        return score_files(path, spec)

    def _require(self, capability: str) -> Any:
        """Return the engine, or raise an `EnginehouseError` if its record does not declare a capability."""
        if capability not in self._record.capabilities:
            raise EnginehouseError(f"{self.context}: engine {self._record.name!r} does not declare {capability!r}")
        return self.engine

    @register
    async def describe(self) -> dict[str, Any]:
        return _describe(self, self._record, type(self.engine).__name__) | {"mesh": dict(self.mesh.axes)}

    @register
    def profile_begin(self) -> None:
        """Begin a profile; see `begin_profile`."""
        begin_profile(self.context)

    @register
    def profile_end(self, directory: str, most: int) -> Profile | None:
        """End the profile, and return it; see `end_profile`."""
        return end_profile(self.context, self.context.rank, directory, most)

    def shutdown(self) -> None:
        stop_profile()
        self.close_weights()
        self.engine.shutdown()


class RolloutWorker(Worker):
    """One replica of a rollout engine. Call `launch` before anything else.

    Methods of updates and control are urgent, because they must run even if many `generate` calls wait.

    Args:
        model: model to load. Its weights are version 0.
        options: options of the engine, which its options class checks.
        replica: number of this replica; None: the rank of this process.
        takes_turns: True if other roles take turns with it on its devices.
    """

    def __init__(
        self,
        backend: str,
        model: ModelSpec,
        options: dict[str, Any] | None = None,
        replica: int | None = None,
        takes_turns: bool = False,
    ):
        self._takes_turns = takes_turns
        self.replica = self.context.rank if replica is None else replica
        self._record: Backend = plugins().get("rollout", backend)
        self._model = model
        self._options = resolve(self._record.options)(**(options or {}))
        self.engine: RolloutEngine = _load_engine_class(self._record, RolloutEngine)()
        self._name = backend  # the engine's name and version after `launch`
        self._endpoint: str | None = None
        self._calls = 0
        self._weights: WeightReceiver | None = None
        self._requests: VerifiedRequestQueue | None = None
        self._asleep: frozenset[str] = frozenset()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights")

    @register
    async def launch(self) -> str:
        """Start the engine, and return its name and version."""
        labels = {**self.context.labels, "replica": self.replica}
        context = dataclasses.replace(self.context, labels=labels, takes_turns=self._takes_turns)
        endpoint = await self.engine.launch(self._model, self._options, context)
        self._name, self._endpoint = endpoint.engine, endpoint.url
        if endpoint.url:
            log.info("OpenAI clients are answered at %s", endpoint.url)
        able = self._record.capabilities
        self._weights = WeightReceiver(
            self.engine, str(self.context), self._thread, capabilities.STAGES_WHILE_GENERATING in able
        )
        seeds = capabilities.SEED in able
        self._requests = VerifiedRequestQueue(self.engine, self._weights, f"{self._name} ({self.context})", seeds=seeds)
        return endpoint.engine

    @property
    def weights(self) -> WeightReceiver:
        return self._require_launched(self._weights)

    @property
    def requests(self) -> VerifiedRequestQueue:
        return self._require_launched(self._requests)

    def _require_launched(self, part: Part | None) -> Part:
        if part is None:
            raise EnginehouseError(f"{self.context} was used before it was launched")
        return part

    @register(dispatch="dp", collect="concat")
    async def generate(self, batch: Batch, sampling: SamplingParams, seed: int | None = None) -> Batch:
        """Generate `sampling.n` completions of each row's prompt.

        Args:
            batch: `prompt_ids` ragged int64. With a seed also `prompt_index` int64 `(rows,)`, the row's index in the
                whole batch. A row's samples depend on the seed and this index, but not on the number of replicas.
            seed: seed of the samples. Equal seeds and weights give equal samples. None: a new seed each time.

        Returns:
            `n` rows for each row of `batch`, next to each other, with the columns of `AnswerBatch.samples`, and
            `seconds` float32 `(rows,)`, the time of this call on the replica. All samples are from verified weights.

        Raises:
            EnginehouseError: the engine's results do not fit the requests.
        """
        begun = time.perf_counter()
        self._calls += 1
        requests = make_seeded_requests(batch, sampling, seed, f"{self.replica}-{self._calls}")
        results = await asyncio.gather(*map(self.requests.begin, requests))
        samples = assemble(requests, results)
        return samples.with_columns(seconds=torch.full((len(samples),), time.perf_counter() - begun))

    @register
    async def draw(self, requests: RequestBatch, aborted: Sequence[str] = ()) -> AnswerBatch:
        """Begin requests, and return the requests that ended since the last call, at least one if any is in progress.

        If `draw` is called again while this call waits, this call returns an empty result, and the new call returns the
        ended requests.

        Args:
            requests: requests to answer from verified weights, as in `generate`; may be empty.
            aborted: ids of requests to end with their tokens so far.
        """
        results, failures, context = [], {}, self.context
        for task in await self.requests.exchange(list(requests.unpack()), aborted):
            if task.cancelled() or (error := task.exception()) is None:
                results.append(task.result())
                continue
            site = CallSite(context.role, context.rank, context.node, os.getpid(), "generate")
            failures[task.get_name()] = WorkerFailure.pack(error, site)
        return AnswerBatch.pack(results, failures)

    @register(collect="distributed")
    async def draw_apart(self, requests: RequestBatch, aborted: Sequence[str] = ()) -> tuple[AnswerBatch, Batch]:
        """Generate as `draw` does, but leave the tokens in this process."""
        return (await self.draw(requests, aborted)).split()

    @register(urgent=True)
    async def score(self, sequences: Sequence[Sequence[int]]) -> list[Sequence[float]]:
        """Return the logprob of each token of sequences given the tokens before it, at temperature 1; 0 for the first.
        Works also between `commit_weights` and `resume_weights`, when `generate` waits."""
        self._calls += 1
        scoring = SamplingParams(max_tokens=0, prompt_logprobs=True)
        name = f"{self.replica}-{self._calls}"
        requests = make_requests(Ragged.from_list([list(tokens) for tokens in sequences]), scoring, None, name)
        results = await asyncio.gather(*(self.engine.generate(request) for request in requests))
        missing = [result.id for result in results if result.prompt_logprobs is None]
        if missing:
            raise EnginehouseError(f"{self.context}: {self._name} returned no logprobs of the prompt for {missing}")
        return [result.prompt_logprobs for result in results if result.prompt_logprobs is not None]

    # Methods that `enginehouse.weights.sync` calls

    @register(urgent=True)
    async def connect_weights(self, plan: TransferPlan, receiver: int | None = None) -> None:
        """Open this replica's side of a weight transport. Close a side that is open already.

        Args:
            receiver: index of the replica among the plan's receivers; None: the replica's number.
        """
        place = self.replica if receiver is None else receiver
        self.weights.connect(plan, load_transport(plan.transport).connect(plan, "recv", place))

    @register(urgent=True)
    async def receive_weights(self, version: int, deadline_seconds: float, pause: PauseMode = "wait") -> ArrivedSums:
        """Stage the weights that arrive as `version` beside the served weights, and return their checksums. An engine
        that does not declare `stages_while_generating` is paused first. Raises `WeightSyncError` if the weights did not
        arrive completely. The old version is served again."""
        return await self.weights.receive(version, deadline_seconds, pause)

    @register(urgent=True)
    async def commit_weights(self, version: int) -> Switched:
        """Pause, switch to the staged weights, and return the served state. `generate` answers only after
        `resume_weights`."""
        return await self.weights.commit(version)

    @register(urgent=True)
    async def resume_weights(self, version: int) -> None:
        """Let `generate` answer again, after `commit_weights`."""
        self.weights.serve(version)

    @register(urgent=True)
    async def abort_weights(self, version: int) -> None:
        """Abort an update: drop the staged weights, and serve the old version if the engine still has it."""
        await self.weights.abort(version)

    @register(urgent=True)
    async def weight_state(self) -> WeightState:
        """Return the served version and checksums."""
        return await self.engine.weight_state()

    @register(urgent=True)
    async def close_weights(self) -> None:
        if self._weights is not None:
            self._weights.close()

    @register(urgent=True)
    async def pause(self, mode: PauseMode = "abort") -> None:
        await self.engine.pause(mode)

    @register(urgent=True)
    async def resume(self) -> None:
        await self.engine.resume()

    @register(urgent=True)
    async def abort(self, ids: Sequence[str] | None = None) -> None:
        """End requests; see `RolloutEngine.abort`."""
        await self.requests.abort(ids)

    @register
    async def sleep(self, tags: tuple[str, ...] = ALL) -> int | None:
        """Wait for requests to end, call `RolloutEngine.sleep`, and return the freed bytes; None if unknown. New
        requests wait until all memory is awake."""
        self._asleep |= sleeping(tags)
        await self.requests.fall_asleep()
        before = held_bytes(self.context.device)
        await self.engine.sleep(tags)
        return freed_bytes(self.context.device, before)

    @register
    async def wake_up(self, tags: tuple[str, ...] = ALL) -> None:
        """Call `RolloutEngine.wake_up`, and begin requests again once all memory is awake."""
        await self.engine.wake_up(tags)
        self._asleep -= sleeping(tags)
        if not self._asleep:
            self.requests.wake_up()

    @register(urgent=True)
    async def health(self) -> Health:
        return await self.engine.health()

    @register
    async def describe(self) -> dict[str, Any]:
        """Describe this process and its engine, for reports. `endpoint` is the URL for OpenAI clients, if any."""
        endpoint = {"endpoint": self._endpoint} if self._endpoint else {}
        return _describe(self, self._record, self._name) | {"rank": self.replica} | endpoint

    @register
    def profile_begin(self) -> None:
        """Begin a profile, if the engine computes in this process; see `begin_profile`."""
        if capabilities.COLOCATES in self._record.capabilities:
            begin_profile(self.context)

    @register
    def profile_end(self, directory: str, most: int) -> Profile | None:
        """End the profile, and return it; see `end_profile`."""
        return end_profile(self.context, self.replica, directory, most)

    async def shutdown(self) -> None:
        await self.close_weights()
        if self._weights is not None:
            await self.engine.shutdown()
        self._thread.shutdown(wait=False)


def fill_defaults(batch: Batch) -> Batch:
    """Add the token columns that a loss needs, if the controller has them only per row.

    In a row that is not `TRAINED`, `loss_mask` becomes False. Each token that `loss_mask` then marks gets the advantage
    of its row, from `advantages` `(rows,)`. If the batch has no `old_logprobs`, the rollout's logprobs replace them.
    """
    if TRAINED in batch:
        mask = batch.ragged("loss_mask")
        batch = batch.with_columns(loss_mask=mask.like(mask.values & batch[TRAINED][mask.row])).drop([TRAINED])
    if "old_logprobs" not in batch and "rollout_logprobs" in batch:
        batch = batch.with_columns(old_logprobs=batch["rollout_logprobs"])
    if "advantages" not in batch or not isinstance(batch["advantages"], torch.Tensor):
        return batch
    mask = batch.ragged("loss_mask")
    per_row = batch["advantages"].float().numpy()
    values = np.repeat(per_row, mask.lengths.numpy())  # torch's function would need three times the memory
    values *= mask.values.numpy()
    return batch.with_columns(advantages=mask.like(torch.from_numpy(values)))


def _prefix_columns(batch: Batch | None, prefix: str) -> Batch | None:
    if batch is None or not prefix:
        return batch
    return Batch({prefix + name: batch[name] for name in batch.columns})


def _to_number(value: float | Mean | Max) -> float:
    return value.value if isinstance(value, (Mean, Max)) else value


def _load_engine_class(record: Backend, protocol: type) -> Any:
    """Return the class of an engine, or raise a `PluginError` if it lacks methods of the protocol."""
    engine = resolve(record.engine)
    if isinstance(engine, type) and (missing := find_missing_methods(engine, protocol)):
        raise PluginError(
            f"engine {record.name!r}: {record.engine} does not implement {protocol.__name__}: it lacks "
            f"{', '.join(missing)}"
        )
    return engine


def _describe(worker: Worker, record: Backend, engine: str) -> dict[str, Any]:
    context = worker.context
    return {
        "rank": context.rank,
        "node": context.node,
        "pid": os.getpid(),
        "device": context.device,
        "backend": record.name,
        "engine": engine,
        "runtime": os.environ.get(RUNTIME_VARIABLE, CURRENT),
        "interpreter": sys.executable,
        "python": platform.python_version(),
        "enginehouse": metadata.version("enginehouse"),
        **installed_versions(("torch", "transformers", "ray", *record.requires)),
    }
