"""Puts the roles of a plan on processes: which groups there are, what they share, and how weights reach the rollout.

A new way of placing roles belongs here; the loop does not change.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from enginehouse.controller import ResourcePool, WorkerGroup, WorkerSpec, colocate, start_ray
from enginehouse.engines.model import ModelSpec
from enginehouse.rl.fleet import RolloutFleet
from enginehouse.rl.roles import RolloutWorker, TrainWorker
from enginehouse.weights.buckets import BUCKET_BYTES
from enginehouse.weights.sync import WeightSync

if TYPE_CHECKING:
    from enginehouse.config.plan import Plan, SFTPlan
    from enginehouse.config.schema import Cluster
    from enginehouse.data import Batch
    from enginehouse.engines.rollout import SamplingParams
    from enginehouse.engines.train import Outputs
    from enginehouse.runtimes import Interpreter

SHORTEST_START_LIMIT_SECONDS = 300.0
"""A worker that imports its engine on a busy machine takes minutes, however quick its calls are."""


@dataclass(frozen=True)
class Evaluation:
    """What answers validation prompts where that is not the rollout.

    Attributes:
        fleet: its one replica.
        transport: name of the weight transport.
        effect_checked: whether the effect of its weights is compared with the trainer's.
    """

    fleet: RolloutFleet
    transport: str
    effect_checked: bool


@dataclass(frozen=True)
class Roles:
    """The worker groups of a run.

    Attributes:
        reference: the model a KL term compares with; None where there is no such term, or `base_is_reference`.
        base_is_reference: that model is the actor's without its adapters.
    """

    actor: WorkerGroup
    rollout: RolloutFleet
    reference: WorkerGroup | None
    sync: WeightSync
    evaluation: Evaluation | None = None
    base_is_reference: bool = False

    def describe(self) -> dict[str, Any]:
        """For reports: each role's processes and what they run."""
        described = {"actor": self.actor.call("describe"), "rollout": self.rollout.describe()}
        if self.reference is not None:
            described["reference"] = self.reference.call("describe")
        return described | ({"evaluation": self.evaluation.fleet.describe()} if self.evaluation else {})

    def score_by_reference(self, batch: Batch, outputs: Outputs) -> Batch | None:
        """What the reference gives for `batch`, as `TrainWorker.forward`; None where there is none."""
        if self.base_is_reference:
            return self.actor.forward_base(batch, outputs)
        return None if self.reference is None else self.reference.forward(batch, outputs)

    def generate_each(
        self, batch: Batch, sampling: SamplingParams, seed: int | None = None
    ) -> Iterator[tuple[Sequence[int], Batch]]:
        """Draw samples, and hand them over as they come; see `RolloutFleet.generate_each`."""
        return self.rollout.generate_each(batch, sampling, seed)

    def validate_each(
        self, batch: Batch, sampling: SamplingParams, seed: int | None = None
    ) -> Iterator[tuple[Sequence[int], Batch]]:
        """As `generate_each`, by what answers validation prompts, which first gets the weights that are served."""
        if self.evaluation is None:
            return self.generate_each(batch, sampling, seed)
        self.sync.serve_on(self.evaluation.fleet, self.evaluation.transport, check=self.evaluation.effect_checked)
        return self.evaluation.fleet.generate_each(batch, sampling, seed)

    def rollout_metrics(self) -> dict[str, float]:
        """What happened to the rollout replicas in a step."""
        return self.rollout.metrics()


@contextmanager
def place(plan: Plan, probe: Sequence[Sequence[int]]) -> Iterator[Roles]:
    """Start every worker of a run; end them all on the way out.

    Args:
        plan: the checked config.
        probe: token sequences for the effect check of weight updates.
    """
    config = plan.config
    actor = _train_spec(plan, config.actor.engine.backend, config.model.path, plan.actor_options)
    rollout = WorkerSpec(
        RolloutWorker, config.rollout.engine.backend, _model_spec(plan, config.model.path), plan.rollout_options
    )
    specs = {"actor": actor}
    if plan.uses_reference and not plan.base_is_reference:
        path = config.reference.path or config.model.path
        specs["reference"] = _train_spec(plan, config.actor.engine.backend, path, plan.actor_options)
    rollout = _under(plan.interpreters["rollout"], rollout)
    colocated = plan.colocated
    if colocated:
        specs["rollout"] = rollout
    with ExitStack() as stack:
        if config.cluster.launcher == "ray":
            stack.enter_context(start_ray(config.cluster.address))
        groups = stack.enter_context(_colocated(plan, specs, config.actor.processes))
        replicas = (
            RolloutFleet.over(groups["rollout"])
            if colocated
            else _fleet(plan, rollout, config.rollout.replicas, plan.gpus_per_replica)
        )
        stack.callback(replicas.shutdown)
        replicas.launch()
        evaluation = _evaluation(plan, stack)
        sync = WeightSync(
            groups["actor"],
            replicas,
            plan.transport,
            bucket_bytes=BUCKET_BYTES,
            timeout=config.cluster.call_timeout_seconds,
            effect_check_every=plan.effect_check_every,
            effect_tolerance=config.weights.effect_tolerance,
            probe=[list(map(int, tokens)) for tokens in probe],
        )
        sync.connect()
        stack.callback(sync.close)
        replicas.catch_up = sync.catch_up
        yield Roles(groups["actor"], replicas, groups.get("reference"), sync, evaluation, plan.base_is_reference)


@contextmanager
def place_actor(plan: SFTPlan) -> Iterator[WorkerGroup]:
    """Start the workers of a supervised run; end them on the way out."""
    config = plan.config
    spec = _train_spec(plan, config.actor.engine.backend, config.model.path, plan.actor_options)
    with ExitStack() as stack:
        if config.cluster.launcher == "ray":
            stack.enter_context(start_ray(config.cluster.address))
        yield stack.enter_context(_colocated(plan, {"actor": spec}, config.actor.processes))["actor"]


@contextmanager
def _colocated(plan: Plan | SFTPlan, specs: dict[str, WorkerSpec], processes: int) -> Iterator[dict[str, WorkerGroup]]:
    cluster = plan.config.cluster
    pool = ResourcePool([processes], gpus_per_process=int(plan.device == "cuda"), timeout=_start_seconds(cluster))
    groups: dict[str, WorkerGroup] = {}
    try:
        groups = colocate(
            pool,
            specs,
            name="+".join(specs),
            launcher=cluster.launcher,
            timeout=cluster.call_timeout_seconds,
            start_timeout=_start_seconds(cluster),
            seed=plan.config.train.seed,
            device=plan.device,
            threads=cluster.threads_per_process,
        )
        yield dict(groups)
    finally:
        for group in groups.values():
            group.shutdown()
        pool.shutdown()


def _start_seconds(cluster: Cluster) -> float:
    return max(cluster.call_timeout_seconds, SHORTEST_START_LIMIT_SECONDS)


def _evaluation(plan: Plan, stack: ExitStack) -> Evaluation | None:
    """The engine of its own for validations, launched, if there is to be one."""
    if (planned := plan.evaluation) is None:
        return None
    model = _model_spec(plan, plan.config.model.path)
    spec = WorkerSpec(RolloutWorker, planned.backend, model, planned.options)
    fleet = _fleet(plan, _under(plan.interpreters["evaluation"], spec), 1, planned.gpus, "evaluation")
    stack.callback(fleet.shutdown)
    fleet.launch()
    return Evaluation(fleet, planned.transport, planned.effect_checked)


def _fleet(plan: Plan, spec: WorkerSpec, replicas: int, gpus: int, name: str = "rollout") -> RolloutFleet:
    """Replicas in processes of their own, each with so many GPUs where there are any."""
    cluster = plan.config.cluster
    return RolloutFleet(
        spec,
        replicas,
        name=name,
        launcher=cluster.launcher,
        gpus_per_process=gpus if plan.device == "cuda" else 0,
        timeout=cluster.call_timeout_seconds,
        start_timeout=_start_seconds(cluster),
        seed=plan.config.train.seed,
        device=plan.device,
        threads=cluster.threads_per_process,
    )


def _train_spec(plan: Plan | SFTPlan, backend: str, path: str, options: dict[str, Any]) -> WorkerSpec:
    spec = WorkerSpec(TrainWorker, backend, _model_spec(plan, path), options)
    return _under(plan.interpreters["actor"], spec)


def _under(interpreter: Interpreter, spec: WorkerSpec) -> WorkerSpec:
    """A worker under the interpreter of its role's runtime."""
    return spec.options(python=interpreter.python, env={**spec.env, **interpreter.env})


def _model_spec(plan: Plan | SFTPlan, path: str) -> ModelSpec:
    model = plan.config.model
    return ModelSpec(
        path=os.path.abspath(path),
        dtype=model.dtype,
        trust_remote_code=model.trust_remote_code,
        seed=plan.config.train.seed,
    )
