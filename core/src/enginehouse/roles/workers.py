"""The two kinds of worker: one holds a training engine's rank, the other a rollout engine's replica.

A worker adds to its engine what is the same for all engines: building it from a backend's record, minibatches,
batches to requests and back, and its end of a weight update. Actor, reference, critic and reward model are
`TrainWorker`s that differ in the model and in what is called.
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
from typing import Any

import numpy as np
import torch

from enginehouse.controller import Worker, register
from enginehouse.controller.launchers.failure import WorkerFailure
from enginehouse.data import Batch, Ragged
from enginehouse.engines.mesh import Mesh
from enginehouse.engines.model import ModelSpec
from enginehouse.engines.progress import note_file_progress, note_progress
from enginehouse.engines.rollout import Health, PauseMode, RolloutEngine, SamplingParams
from enginehouse.engines.sleep import sleeping
from enginehouse.engines.train import ALL, LossSpec, Max, Mean, Metrics, Outputs, TrainEngine, merge_metrics
from enginehouse.engines.weights import (
    ArrivedSums,
    ParamMeta,
    TransferPlan,
    TransportSession,
    WeightState,
    WeightSyncError,
)
from enginehouse.errors import EnginehouseError
from enginehouse.fleet.columns import Answer, Requests, assemble
from enginehouse.fleet.drawing import Drawing
from enginehouse.fleet.generation import make_requests, seeded_requests
from enginehouse.plugin import Backend, PluginError, capabilities, plugins, resolve
from enginehouse.plugin.references import find_missing_methods
from enginehouse.plugin.requirements import installed_versions
from enginehouse.roles.file_scores import FileScores, score_files
from enginehouse.roles.footprint import freed_bytes, freed_bytes_of
from enginehouse.roles.profiles import Profile, begin_profile, end_profile, stop_profile
from enginehouse.roles.sequence_scores import VALUES, with_end
from enginehouse.runtimes import CURRENT, RUNTIME_VARIABLE
from enginehouse.weights.receiver import WeightReceiver
from enginehouse.weights.transports.ends import address_of, weights_for
from enginehouse.weights.transports.lookup import load_transport

log = logging.getLogger(__name__)

TRAINED = "trained"
"""A column bool `(rows,)` of a batch to be trained on: whether the row's tokens count."""


class TrainWorker(Worker):
    """One rank of a training engine.

    Args:
        backend: name of a training backend, as in the config.
        model: what to train.
        options: the backend's own options, checked here by its own type.
    """

    def __init__(self, backend: str, model: ModelSpec, options: dict[str, Any] | None = None):
        record = plugins().get("train", backend)
        self._record = record
        checked = resolve(record.options)(**(options or {}))
        self.engine: TrainEngine = _engine_class(record, TrainEngine)()
        self.engine.setup(model, checked, self.context)
        self._session: TransportSession | None = None

    @property
    def mesh(self) -> Mesh:
        """The engine's mesh: how the controller splits batches over the ranks."""
        return self.engine.mesh

    @register(dispatch="dp")
    def forward(self, batch: Batch, outputs: Outputs, prefix: str = "") -> Batch | None:
        """Compute per-token outputs of `input_ids`, in columns whose names begin with `prefix`; see
        `TrainEngine.forward`."""
        return _renamed(self.engine.forward(batch, outputs), prefix)

    @register(dispatch="dp")
    def forward_base(self, batch: Batch, outputs: Outputs, prefix: str = "") -> Batch | None:
        """As `forward`, without adapters; see `TrainsAdapters.forward_base`."""
        return _renamed(self._offering(capabilities.LORA).forward_base(batch, outputs), prefix)

    @register(dispatch="dp")
    def score_rows(self, batch: Batch) -> Batch | None:
        """Score whole sequences by a model with a value head: `score` float32 `(rows,)` of `input_ids`."""
        scored = self.engine.forward(with_end(batch), VALUES)
        if scored is None:
            return None
        values = scored.ragged("values")
        return Batch({"score": values.values[values.offsets[1:] - 1]})

    @register(dispatch="dp", collect="merge")
    def update(
        self,
        batch: Batch,
        loss: LossSpec,
        minibatches: int = 1,
        epochs: int = 1,
        first_loss: LossSpec | None = None,
    ) -> dict[str, float | Mean | Max]:
        """Train on a batch: `epochs` passes of `minibatches` optimizer steps each.

        The number of steps is the same on all ranks, however their shards differ: a rank without rows of a mini-batch
        takes part in its step with none.

        Args:
            batch: `input_ids`, `loss_mask` and what the loss needs, but for what `with_defaults` adds; with more than
                one mini-batch also `minibatch` int64 `(rows, epochs)`, see `enginehouse_rl.steps.minibatches`.
            loss: what to minimise.
            minibatches: optimizer steps a pass.
            epochs: passes over the batch.
            first_loss: instead of `loss` in the first optimizer step, which still sees the weights as they came.

        Returns:
            The loss's means over all steps; the optimizer's figures (`grad_norm`, `lr`, `skipped`), each the average
            over the steps; `optimizer_steps`; and `busy/update`, seconds in this method, the mean over ranks.
        """
        begun = time.perf_counter()
        batch = with_defaults(batch)
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
            name: sum(_number(step[name]) for step in steps) / len(steps) for name in (steps[0] if steps else ())
        }
        return {
            **merge_metrics(parts),
            **figures,
            "optimizer_steps": float(len(steps)),
            "busy/update": Mean(time.perf_counter() - begun, 1.0),
        }

    # Weights

    @register(dispatch="rank_zero")
    def weight_metadata(self) -> list[ParamMeta]:
        """What the engine's weights are, under their Hugging Face names."""
        return self.engine.weight_source().metadata()

    @register
    def connect_weights(self, plan: TransferPlan) -> str:
        """Open this rank's end of a weight transport, closing one that was open; returns where it is reached."""
        self.close_weights()
        host = plan.host or self.context.node
        plan = dataclasses.replace(plan, host=host)
        self._session = load_transport(plan.transport).connect(plan, "send", self.context.rank)
        return address_of(self._session, host)

    @register
    def send_weights(self, version: int, deadline_seconds: float) -> dict[str, str]:
        """Send the current weights as `version`.

        Returns:
            The checksum of each parameter, or part of one, before it left; empty on a rank that does not send.
        """
        if self._session is None:
            raise WeightSyncError(f"{self.context} was asked for weights before a transport was connected")
        return self._session.send(version, weights_for(self._session, self.engine.weight_source()), deadline_seconds)

    @register
    async def abort_weights(self, version: int) -> None:
        """Make `send_weights` fail, for this version, whether it runs or comes later."""
        if self._session is not None:
            self._session.abort(version)

    @register
    def close_weights(self) -> None:
        """Close this rank's end of the weight transport."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    # State

    @register
    def onload(self, tags: tuple[str, ...] = ALL) -> None:
        """Bring offloaded state back; see `OffloadsState.onload`."""
        self._offering(capabilities.OFFLOAD).onload(tags)

    @register
    def offload(self, tags: tuple[str, ...] = ALL) -> int | None:
        """Move state to host memory; see `OffloadsState.offload`. Returns the bytes that were freed, where it can be
        told."""
        engine = self._offering(capabilities.OFFLOAD)
        return freed_bytes(self.context.device, lambda: engine.offload(tags))

    @register
    def save(self, path: str, what: tuple[str, ...] = ALL) -> None:
        """Write a checkpoint; see `TrainEngine.save`."""
        with note_file_progress():
            self.engine.save(path, what)

    @register
    def save_in_background(self, path: str, what: tuple[str, ...] = ALL) -> None:
        """Copy the state for a checkpoint that is then written; see `SavesInBackground`."""
        self._offering(capabilities.BACKGROUND_SAVE).save_in_background(path, what)

    @register
    def finish_save(self) -> None:
        """Wait for a background save; see `SavesInBackground`."""
        with note_file_progress():
            self._offering(capabilities.BACKGROUND_SAVE).finish_save()

    @register
    def load(self, path: str, what: tuple[str, ...] = ALL) -> None:
        """Load a checkpoint; see `TrainEngine.load`."""
        with note_file_progress():
            self.engine.load(path, what)

    @register
    def export_hf(self, path: str) -> None:
        """Write the model as a Hugging Face directory; see `TrainEngine.export_hf`."""
        with note_file_progress():
            self.engine.export_hf(path)

    @register
    def export_adapter(self, path: str) -> None:
        """Write the adapters alone; see `TrainsAdapters.export_adapter`."""
        with note_file_progress():
            self._offering(capabilities.LORA).export_adapter(path)

    @register(dispatch="rank_zero")
    def score_files(self, path: str, spec: ModelSpec) -> FileScores:
        """Score a row by transformers from what `export_hf` or `export_adapter` wrote; see `compare_export`."""
        return score_files(path, spec)

    def _offering(self, capability: str) -> Any:
        """The engine, if its backend declares a capability.

        Raises:
            EnginehouseError: it does not.
        """
        if capability not in self._record.capabilities:
            raise EnginehouseError(f"{self.context}: backend {self._record.name!r} does not declare {capability!r}")
        return self.engine

    @register
    async def describe(self) -> dict[str, Any]:
        """What runs here, for reports."""
        return _describe(self, self._record, type(self.engine).__name__) | {"mesh": dict(self.mesh.axes)}

    @register
    def profile_begin(self) -> None:
        """Have torch.profiler look on; see `begin_profile`."""
        begin_profile(self.context)

    @register
    def profile_end(self, directory: str, most: int) -> Profile | None:
        """What it saw; see `end_profile`."""
        return end_profile(self.context, self.context.rank, directory, most)

    def shutdown(self) -> None:
        """Release the engine and the transport."""
        stop_profile()
        self.close_weights()
        self.engine.shutdown()


class RolloutWorker(Worker):
    """One replica of a rollout engine. `launch` must come before anything else.

    Whatever an update or a person at the controls needs is urgent: it must run though many `generate` wait.

    Args:
        backend: name of a rollout backend, as in the config.
        model: what to load; its weights count as version 0.
        options: the backend's own options, checked here by its own type.
        replica: this replica's number, where it is not its rank.
        takes_turns: whether others have its devices in turns with it.
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
        record: Backend = plugins().get("rollout", backend)
        self._record = record
        self._model = model
        self._options = resolve(record.options)(**(options or {}))
        self.engine: RolloutEngine = _engine_class(record, RolloutEngine)()
        self._name = backend  # the engine's own name and version once it is launched
        self._endpoint: str | None = None
        self._calls = 0
        self._weights: WeightReceiver | None = None
        self._drawing: Drawing | None = None
        self._asleep: frozenset[str] = frozenset()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights")

    @register
    async def launch(self) -> str:
        """Start the engine.

        Returns:
            Its name and version.
        """
        labels = {**self.context.labels, "replica": self.replica}
        context = dataclasses.replace(self.context, labels=labels, takes_turns=self._takes_turns)
        endpoint = await self.engine.launch(self._model, self._options, context)
        self._name, self._endpoint = endpoint.engine, endpoint.url
        if endpoint.url:
            log.info("OpenAI clients are answered at %s", endpoint.url)
        self._weights = WeightReceiver(self.engine, str(self.context), self._thread)
        seeds = capabilities.SEED in self._record.capabilities
        self._drawing = Drawing(self.engine, self._weights, f"{self._name} ({self.context})", seeds=seeds)
        return endpoint.engine

    @property
    def weights(self) -> WeightReceiver:
        """This replica's end of weight updates."""
        if self._weights is None:
            raise EnginehouseError(f"{self.context} was used before it was launched")
        return self._weights

    @property
    def drawing(self) -> Drawing:
        """The requests under way here."""
        if self._drawing is None:
            raise EnginehouseError(f"{self.context} was used before it was launched")
        return self._drawing

    @register(dispatch="dp", collect="concat")
    async def generate(self, batch: Batch, sampling: SamplingParams, seed: int | None = None) -> Batch:
        """Draw `sampling.n` completions of each row's prompt.

        Args:
            batch: `prompt_ids` ragged int64; with a seed also `prompt_index` int64 `(rows,)`, the row's number in the
                whole batch: a row's samples depend on the seed and this number, not on the number of replicas.
            sampling: how to draw.
            seed: same seed, same weights: same samples. None draws afresh.

        Returns:
            `n` rows for each row of `batch`, next to each other: the columns of `Answer.samples`, and `seconds` float32
            `(rows,)`, how long this replica took for its share. The columns of `batch` are not returned. All of it
            was drawn from verified weights: what was not is drawn anew.

        Raises:
            EnginehouseError: the engine's results are not those of the requests.
        """
        begun = time.perf_counter()
        self._calls += 1
        requests = seeded_requests(batch, sampling, seed, f"{self.replica}-{self._calls}")
        results = await asyncio.gather(*map(self.drawing.begin, requests))
        samples = assemble(requests, results)
        return samples.with_columns(seconds=torch.full((len(samples),), time.perf_counter() - begun))

    @register
    async def draw(self, requests: Requests, aborted: Sequence[str] = ()) -> Answer:
        """Take up requests, and hand out what ended since this was called last: at least one, if any is under way.

        So one call is enough to hand over and to collect. A further one releases it, and gets what ended: this answers
        with nothing.

        Args:
            requests: to be drawn from verified weights, as by `generate`; may be none.
            aborted: ids of requests that are to end with what they have.
        """
        drawn, failures, context = [], {}, self.context
        for task in await self.drawing.exchange(list(requests.unpack()), aborted):
            if task.cancelled() or (error := task.exception()) is None:
                drawn.append(task.result())
                continue
            failures[task.get_name()] = WorkerFailure.of(
                error, context.role, context.rank, context.node, os.getpid(), "generate", ()
            )
        return Answer.pack(drawn, failures)

    @register(collect="distributed")
    async def draw_apart(self, requests: Requests, aborted: Sequence[str] = ()) -> tuple[Answer, Batch]:
        """As `draw`; the tokens stay where they were made."""
        return (await self.draw(requests, aborted)).split()

    @register(urgent=True)
    async def score(self, sequences: Sequence[Sequence[int]]) -> list[Sequence[float]]:
        """Logprob of each token of some sequences given those before it, the first 0, at temperature 1.

        Answers also between `commit_weights` and `resume_weights`, when `generate` waits.
        """
        self._calls += 1
        scoring = SamplingParams(max_tokens=0, prompt_logprobs=True)
        name = f"{self.replica}-{self._calls}"
        requests = make_requests(Ragged.from_list([list(tokens) for tokens in sequences]), scoring, None, name)
        results = await asyncio.gather(*(self.engine.generate(request) for request in requests))
        missing = [result.id for result in results if result.prompt_logprobs is None]
        if missing:
            raise EnginehouseError(f"{self.context}: {self._name} returned no logprobs of the prompt for {missing}")
        return [result.prompt_logprobs for result in results if result.prompt_logprobs is not None]

    # Weights; the order of things is the controller's, `enginehouse.weights.sync`

    @register(urgent=True)
    async def connect_weights(self, plan: TransferPlan, receiver: int | None = None) -> None:
        """Open this replica's end of a weight transport, closing one that was open.

        Args:
            plan: of the transfer.
            receiver: its place among the plan's receivers, where it is not its number.
        """
        place = self.replica if receiver is None else receiver
        self.weights.connect(plan, load_transport(plan.transport).connect(plan, "recv", place))

    @register(urgent=True)
    async def receive_weights(self, version: int, deadline_seconds: float, pause: PauseMode = "wait") -> ArrivedSums:
        """Pause, and stage what arrives as `version` beside what is served.

        Returns:
            The checksums of what arrived.

        Raises:
            WeightSyncError: it did not arrive whole; the old version is served again.
        """
        return await self.weights.receive(version, deadline_seconds, pause)

    @register(urgent=True)
    async def commit_weights(self, version: int) -> WeightState:
        """Switch to what was staged, and say what is served; only `score` is answered until `resume_weights`."""
        return await self.weights.commit(version)

    @register(urgent=True)
    async def resume_weights(self, version: int) -> None:
        """Answer `generate` again after `commit_weights`."""
        self.weights.serve(version)

    @register(urgent=True)
    async def abort_weights(self, version: int) -> None:
        """Give up an update: what was staged is thrown away, and the old version served, if it still is there."""
        await self.weights.abort(version)

    @register(urgent=True)
    async def weight_state(self) -> WeightState:
        """Version and checksums as served."""
        return await self.engine.weight_state()

    @register(urgent=True)
    async def close_weights(self) -> None:
        """Close this replica's end of the weight transport."""
        if self._weights is not None:
            self._weights.close()

    # Control

    @register(urgent=True)
    async def pause(self, mode: PauseMode = "abort") -> None:
        """See `RolloutEngine.pause`."""
        await self.engine.pause(mode)

    @register(urgent=True)
    async def resume(self) -> None:
        """See `RolloutEngine.resume`."""
        await self.engine.resume()

    @register(urgent=True)
    async def abort(self, ids: Sequence[str] | None = None) -> None:
        """See `RolloutEngine.abort`."""
        await self.drawing.abort(ids)

    @register
    async def sleep(self, tags: tuple[str, ...] = ALL) -> int | None:
        """See `RolloutEngine.sleep`; what it draws ends first, and what comes waits until all is awake.

        Returns:
            The bytes that were freed, where it can be told.
        """
        self._asleep |= sleeping(tags)
        await self.drawing.fall_asleep()
        return await freed_bytes_of(self.context.device, self.engine.sleep(tags))

    @register
    async def wake_up(self, tags: tuple[str, ...] = ALL) -> None:
        """See `RolloutEngine.wake_up`."""
        await self.engine.wake_up(tags)
        self._asleep -= sleeping(tags)
        if not self._asleep:
            self.drawing.wake_up()

    @register(urgent=True)
    async def health(self) -> Health:
        """See `RolloutEngine.health`."""
        return await self.engine.health()

    @register
    async def describe(self) -> dict[str, Any]:
        """What runs here, for reports; `endpoint` is the URL for OpenAI clients, where there is one."""
        endpoint = {"endpoint": self._endpoint} if self._endpoint else {}
        return _describe(self, self._record, self._name) | {"rank": self.replica} | endpoint

    @register
    def profile_begin(self) -> None:
        """Have torch.profiler look on, where the engine computes in this process; see `begin_profile`."""
        if capabilities.COLOCATES in self._record.capabilities:
            begin_profile(self.context)

    @register
    def profile_end(self, directory: str, most: int) -> Profile | None:
        """What it saw; see `end_profile`."""
        return end_profile(self.context, self.replica, directory, most)

    async def shutdown(self) -> None:
        """Release the engine and the transport."""
        await self.close_weights()
        if self._weights is not None:
            await self.engine.shutdown()
        self._thread.shutdown(wait=False)


def with_defaults(batch: Batch) -> Batch:
    """What a loss is given for each token, where the controller knows less: no token of a row that `TRAINED` says is
    not trained on counts; of `advantages` `(rows,)` each counted token has its row's; of samples without
    `old_logprobs` these are the rollout's."""
    if TRAINED in batch:
        mask = batch.ragged("loss_mask")
        batch = batch.with_columns(loss_mask=mask.like(mask.values & batch[TRAINED][mask.row])).drop([TRAINED])
    if "old_logprobs" not in batch and "rollout_logprobs" in batch:
        batch = batch.with_columns(old_logprobs=batch["rollout_logprobs"])
    if "advantages" not in batch or not isinstance(batch["advantages"], torch.Tensor):
        return batch
    mask = batch.ragged("loss_mask")
    per_row = batch["advantages"].float().numpy()
    values = np.repeat(per_row, mask.lengths.numpy())  # torch's would need three times the memory
    values *= mask.values.numpy()
    return batch.with_columns(advantages=mask.like(torch.from_numpy(values)))


def _renamed(batch: Batch | None, prefix: str) -> Batch | None:
    if batch is None or not prefix:
        return batch
    return Batch({prefix + name: batch[name] for name in batch.columns})


def _number(value: float | Mean | Max) -> float:
    return value.value if isinstance(value, (Mean, Max)) else value


def _engine_class(record: Backend, protocol: type) -> Any:
    """The class of a backend's engine.

    Raises:
        PluginError: it lacks methods of the protocol.
    """
    engine = resolve(record.engine)
    if isinstance(engine, type) and (missing := find_missing_methods(engine, protocol)):
        raise PluginError(
            f"backend {record.name!r}: {record.engine} is no {protocol.__name__}; it lacks {', '.join(missing)}"
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
