"""The library: starts, places and connects engines by name, for your own training loop.

    with start_engines("model", actor=Engine("torch", {"lr": 1e-6}), rollout=Engine("vllm")) as roles:
        roles.sync.publish(1)  # each replica serves the actor's weights as version 1, verified
        batch = roles.rollout.draw(prompts, SamplingParams(max_tokens=64, n=8))  # prompts as token ids
        metrics = roles.actor.update(batch.with_columns(advantages=advantages), LossSpec("my_module:my_loss"))

A training loop imports what it needs from this module. enginehouse's own trainer uses the same engines, workers and
transports, but this library does not use the trainer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from pydantic import ValidationError

from enginehouse.controller import Balanced
from enginehouse.data import Batch, Ragged
from enginehouse.engines import LossSpec, LossValue, Mean, ModelSpec, Outputs, SamplingParams, TokenView
from enginehouse.engines.options import EngineOptions, RolloutOptions
from enginehouse.errors import UserError, join_problems, nearest
from enginehouse.fleet.fleet import RolloutFleet
from enginehouse.plugin import Backend, Placement, RolloutBackend, TrainBackend, Transport, plugins, resolve
from enginehouse.plugin.capabilities import ADAPTER_UPDATES, PROMPT_LOGPROBS
from enginehouse.roles.launch import Launch
from enginehouse.roles.placement import Roles, place
from enginehouse.roles.role_plan import RolePlan, own_processes, why_apart
from enginehouse.runtimes import choose_runtime

__all__ = [
    "Balanced",
    "Batch",
    "Engine",
    "Launch",
    "LossSpec",
    "LossValue",
    "Mean",
    "ModelSpec",
    "Outputs",
    "Ragged",
    "Roles",
    "RolloutFleet",
    "SamplingParams",
    "TokenView",
    "start_engines",
]

PLACEMENTS = ("auto", "colocated", "shared", "separate")

PROBE = (tuple(range(8)),)
"""Token ids that every vocabulary has, for the effect check of weight updates."""


@dataclass(frozen=True)
class Engine:
    """An engine for a role.

    Attributes:
        backend: name of the engine, as `enginehouse plugins list` shows it.
        options: options of the engine, which its options class checks.
        processes: number of ranks of a training engine, or of replicas of a rollout engine.
        model: model to load; None: the model of `start_engines`.
        shares: role whose processes this engine shares; None: it shares no processes. Ignored for the rollout engine,
            because `placement` decides there.
        runtime: Python environment of the engine's processes: a value of the argument `wanted` of
            `enginehouse.runtimes.choose_runtime`.
        env: environment variables of the engine's processes.
    """

    backend: str
    options: Mapping[str, Any] = field(default_factory=dict)
    processes: int = 1
    model: ModelSpec | None = None
    shares: str | None = None
    runtime: str = "auto"
    env: Mapping[str, str] = field(default_factory=dict)


@contextmanager
def start_engines(
    model: str | ModelSpec,
    *,
    actor: Engine,
    rollout: Engine | None = None,
    placement: Literal["auto", "colocated", "shared", "separate"] = "auto",
    transport: str = "auto",
    effect_check_every: int = 50,
    probe: Sequence[Sequence[int]] = PROBE,
    launch: Launch | None = None,
    **others: Engine,
) -> Iterator[Roles]:
    """Start the engines, connect the actor to the rollout for weight updates, and stop all engines when the block ends.

    Names and options are checked before a process starts.

    Args:
        model: model of the policy, or its directory.
        actor: training engine of the policy.
        rollout: rollout engine; None: no responses are generated.
        placement: `"colocated"`: the rollout runs in the actor's processes; `"shared"`: it takes turns with the actor
            on the same devices (`enginehouse.roles.device_turns`); `"separate"`: it has its own devices; `"auto"`:
            colocated if possible, else separate.
        transport: name of the weight transport; `"auto"`: the plugins choose a transport for the placement.
        effect_check_every: number of weight updates from one effect check to the next; 0: no effect checks. Effect
            checks are also omitted if the rollout engine cannot return logprobs of prompts.
        probe: token ids of the sequences that the effect check scores.
        launch: options for starting processes; None: Ray starts them, on this machine's GPUs if there are any.
        others: training engines of further roles, such as `critic` or `reference`. Their worker groups are in
            `Roles.groups`.

    Yields:
        The roles: `actor` (a `WorkerGroup` of `TrainWorker`s), `rollout` (a `RolloutFleet`), `sync` (a `WeightSync`)
            and `groups`.

    Raises:
        UserError: an engine or transport is unknown, an engine rejects an option, or the placement is impossible.
        PlacementError: the cluster does not have enough room or devices for the processes.
        WorkerError: an engine could not be started, for example because the model does not exist.
        WeightSyncError: the weights cannot be sent to the rollout.
    """
    if placement not in PLACEMENTS:
        raise UserError(f"unknown placement {placement!r}. {nearest(placement, PLACEMENTS)}")
    launch = launch or Launch(device="cuda" if torch.cuda.is_available() else "cpu", device_is_asked=False)
    policy = ModelSpec(model) if isinstance(model, str) else model
    roles = {name: _plan_role(name, engine, policy, launch) for name, engine in {"actor": actor, **others}.items()}
    for name, role in roles.items():
        if role.shares is not None and role.shares not in own_processes(roles):
            raise UserError(f"{name}: no role {role.shares!r} has processes to share. {nearest(role.shares, roles)}")
    if rollout is not None:
        role = replace(_plan_role("rollout", rollout, policy, launch), effect_check_every=effect_check_every)
        roles["rollout"] = _place_rollout(role, roles["actor"], launch, placement, transport)
    with place(roles, launch, probe) as placed:
        yield placed


def _place_rollout(role: RolePlan, actor: RolePlan, launch: Launch, placement: str, transport: str) -> RolePlan:
    """Return the rollout's plan with its place beside the actor, its transport, and the checks that it can do."""
    record = plugins().get(RolloutBackend, role.backend, elsewhere=True)
    if role.model.adapter is not None:
        _check_adapter(role, record, actor, placement)
    role = replace(
        role,
        shares="actor" if _lives_with_actor(placement, actor, role, record, launch) else None,
        devices_of="actor" if placement == "shared" else None,
        effect_check_every=role.effect_check_every if PROMPT_LOGPROBS in record.capabilities else 0,
    )
    return replace(role, transport=_choose_transport(transport, actor, role, record, launch))


def _check_adapter(role: RolePlan, record: RolloutBackend, actor: RolePlan, placement: str) -> None:
    """Check that the rollout adds the adapter that the actor trains to the model that the actor adapts."""
    adapter = None if role.model.adapter is None else role.model.adapter.model_dump()
    for able in (plugins().get(TrainBackend, actor.backend, elsewhere=True), record):
        if ADAPTER_UPDATES not in able.capabilities:
            raise UserError(
                f"rollout: engine {able.name!r} lacks the capability {ADAPTER_UPDATES!r}: leave adapter unset"
            )
    if actor.options.get("lora") != adapter:
        raise UserError(f"rollout: adapter is {adapter}, but the actor trains {actor.options.get('lora')} (lora)")
    if actor.model.path != role.model.path:
        raise UserError(f"rollout: the adapter is for {actor.model.path!r}, not for {role.model.path!r}")
    if placement == "shared":
        raise UserError("rollout: with placement 'shared' it needs whole weights: leave adapter unset")


def _plan_role(name: str, engine: Engine, policy: ModelSpec, launch: Launch) -> RolePlan:
    """Check the engine's name, options and runtime, and return the plan of its role."""
    kind: Literal["train", "rollout"] = "rollout" if name == "rollout" else "train"
    record: Backend = plugins().get(kind, engine.backend, elsewhere=True)
    model = engine.model or policy
    options = _check_options(name, engine, record, model, launch)
    if options.servers():  # the engines run already
        record = replace(record, requires=())
    elif engine.runtime == "auto" and not record.runtimes:
        plugins().get(kind, engine.backend)  # raises an error that names the missing packages
    interpreter = choose_runtime(record, engine.runtime, launch.device)
    if interpreter.python is not None and launch.launcher == "inline":
        raise UserError(
            f"{name}: an inline run has one process and one interpreter, but engine {record.name!r} needs the runtime "
            f"{interpreter.name} ({interpreter.reason}): use launch=Launch(launcher='ray')"
        )
    return RolePlan(
        kind=kind,
        backend=engine.backend,
        options=options.model_dump(),
        model=model,
        processes=engine.processes,
        shares=engine.shares,
        gpus=options.gpus() if isinstance(options, RolloutOptions) else 1,
        quantizes=isinstance(options, RolloutOptions) and options.quantizes(),
        interpreter=interpreter,
        env=engine.env,
        trained=kind == "train",
    )


def _check_options(name: str, engine: Engine, record: Backend, model: ModelSpec, launch: Launch) -> EngineOptions:
    """Return an engine's options with all defaults. Raise a `UserError` if an option is invalid, or does not fit the
    dtype, the device or the number of processes."""
    schema: type[EngineOptions] = resolve(record.options)
    try:
        options = schema.model_validate(dict(engine.options)).for_device(launch.device)
        options.check(engine.processes)
        options.check_device(launch.device, model.dtype)
    except ValidationError as error:
        problems = []
        for detail in error.errors():
            option = ".".join(map(str, detail["loc"]))
            if detail["type"] == "extra_forbidden":
                problems.append(f"unknown option {option!r}. {nearest(option, schema.model_fields)}")
            else:
                problems.append(f"{option}: {detail['msg']}")
        raise UserError(join_problems(problems, f"{name}: options of engine {record.name!r}")) from None
    except UserError as error:
        raise UserError(f"{name}: options of engine {record.name!r}: {error}") from error
    return options


def _lives_with_actor(
    placement: str, actor: RolePlan, rollout: RolePlan, record: RolloutBackend, launch: Launch
) -> bool:
    """Return True if the rollout runs in the actor's processes. Raise a `UserError` if the placement is impossible."""
    if placement == "shared" and launch.launcher == "inline":
        raise UserError(
            "placement cannot be 'shared': an inline run has one process, and engines take turns only in separate "
            "processes; leave placement at 'auto'"
        )
    if placement not in ("auto", "colocated"):
        return False
    apart = "" if launch.launcher == "inline" else why_apart(actor.interpreter, rollout.interpreter, record)
    if not apart and rollout.processes != actor.processes:
        apart = f"the rollout has {rollout.processes} processes, but the actor has {actor.processes}"
    if apart and placement == "colocated":
        raise UserError(f"the rollout cannot run in the actor's processes: {apart}; leave placement at 'auto'")
    return not apart


def _choose_transport(name: str, actor: RolePlan, rollout: RolePlan, record: RolloutBackend, launch: Launch) -> str:
    """Return the name of the weight transport. Raise a `UserError` if the name is unknown, or if no transport reaches
    the rollout."""
    if name != "auto":
        if plugins().is_name(name):
            plugins().get(Transport, name)
        return name
    where = Placement(
        colocated=rollout.shares is not None or launch.launcher == "inline",
        hosts=1 + bool(launch.address),
        device=launch.device,
        training_ranks=actor.processes,
    )
    trains = plugins().get(TrainBackend, actor.backend, elsewhere=True)
    return plugins().name_of(plugins().pick_transport(trains, record, where))
