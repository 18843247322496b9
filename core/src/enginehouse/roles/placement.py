"""Puts roles on processes, whatever the loop: groups, what they share, and how weights reach the rollout.

A new way of placing roles belongs here; the loop does not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from enginehouse.controller import Balanced, ResourcePool, WorkerGroup, WorkerSpec, colocate, start_ray
from enginehouse.controller.errors import PlacementError
from enginehouse.controller.placement_group import Room, cores_per_gpu, count_gpus
from enginehouse.fleet.fleet import RolloutFleet, samples_in_flight
from enginehouse.plugin.secrets import insert_variables
from enginehouse.roles.role_plan import own_processes
from enginehouse.roles.turns import PARAMS, Turns
from enginehouse.roles.workers import RolloutWorker, TrainWorker
from enginehouse.weights.buckets import BUCKET_BYTES
from enginehouse.weights.sync import WeightSync

if TYPE_CHECKING:
    from enginehouse.controller import DistributedBatch
    from enginehouse.data import Batch
    from enginehouse.engines.train import Outputs
    from enginehouse.roles.launch import Launch
    from enginehouse.roles.role_plan import RolePlan

MOST_THREADS = 8
"""Of a process beside a GPU: what is left to its host, as AdamW of offloaded state, gains little by more."""


@dataclass(frozen=True)
class Roles:
    """The roles of a run, started.

    Attributes:
        plans: what was planned for each, by name.
        groups: what plays those that compute.
        fleets: what plays those that generate.
        turns: who has the devices, where roles share some.
        weights: brings the actor's weights to the rollout; None where nothing generates, or nothing is trained.
    """

    plans: Mapping[str, RolePlan]
    groups: Mapping[str, WorkerGroup]
    fleets: Mapping[str, RolloutFleet]
    turns: Turns
    weights: WeightSync | None = None

    @property
    def actor(self) -> WorkerGroup:
        """The policy that is trained."""
        return self.groups["actor"]

    @property
    def trained(self) -> dict[str, WorkerGroup]:
        """The roles that the loop updates: what they learned is saved."""
        return {name: self.groups[name] for name, plan in self.plans.items() if plan.trained}

    @property
    def rollout(self) -> RolloutFleet:
        """What answers the prompts of a step."""
        return self.fleets["rollout"]

    @property
    def sync(self) -> WeightSync:
        """As `weights`, of a run that trains what generates."""
        assert self.weights is not None
        return self.weights

    def describe(self) -> dict[str, Any]:
        """For reports: each role's processes and what they run."""
        parts: dict[str, WorkerGroup | RolloutFleet] = {**self.groups, **self.fleets}
        return {name: parts[name].call("describe") for name in self.plans}

    def score_by_reference(self, batch: Batch | DistributedBatch, outputs: Outputs) -> DistributedBatch:
        """What the reference gives for `batch`, in columns `reference_...`: its own role, else the actor's base."""
        dealt = Balanced(batch, by="input_ids")
        if reference := self.groups.get("reference"):
            return reference.forward(dealt, outputs, "reference_")
        return self.actor.forward_base(dealt, outputs, "reference_")

    def evaluating(self) -> RolloutFleet:
        """What answers validation prompts, once it serves what the rollout does."""
        if (plan := self.plans.get("evaluation")) is None:
            return self.rollout
        fleet = self.fleets["evaluation"]
        with self.turns.on_devices(PARAMS):
            self.sync.serve_on(fleet, plan.transport or "", check=plan.effect_check_every > 0)
        return fleet


@contextmanager
def place(
    roles: Mapping[str, RolePlan],
    launch: Launch,
    probe: Sequence[Sequence[int]] = (),
    came: Callable[[str], None] = lambda what: None,
) -> Iterator[Roles]:
    """Start the workers of all roles; end them on the way out.

    Args:
        roles: what plays each, by its name. Those that share processes are built in this order.
        launch: how their processes are started.
        probe: token sequences for the effect check of weight updates.
        came: told of each role's processes once they are there, and of each rollout engine once it is loaded.
    """
    with ExitStack() as stack:
        room = None
        if launch.launcher == "ray":
            cluster = stack.enter_context(start_ray(launch.address))
            came("Ray")
            _check_device(launch, joined=not cluster.owned)
            room = Room.of_cluster()
        started: dict[str, WorkerGroup] = {}
        fleets: dict[str, RolloutFleet] = {}
        pools: dict[str, ResourcePool] = {}
        for name, role in own_processes(roles).items():  # hosts first
            if role.kind == "rollout":
                fleets[name] = _fleet(launch, name, roles[name], pools, room)
                stack.callback(fleets[name].shutdown)
            else:
                pools[name] = _pool(launch, name, roles, room)
                stack.callback(pools[name].shutdown)
                started |= stack.enter_context(_colocated(launch, name, roles, pools[name]))
            came(_processes(roles, name))
        for name, role in roles.items():
            if role.kind == "rollout" and name in started:
                fleets[name] = RolloutFleet.over(started.pop(name))
                stack.callback(fleets[name].shutdown)
        turns = Turns.of(roles, started, fleets)
        turns.start()
        for name, fleet in fleets.items():
            fleet.tokens_stay = launch.tokens_stay
            if roles[name].devices_of is None:
                fleet.launch()
                came(f"the engine of {name}")
        sync = None
        if "rollout" in fleets and "actor" in started:
            sync = _connected(launch, roles["rollout"], started["actor"], fleets["rollout"], probe, stack)
            turns.have_part_in(sync)
        yield Roles(roles, started, fleets, turns, sync)


def _processes(roles: Mapping[str, RolePlan], host: str) -> str:
    named = ", ".join(name for name, one in roles.items() if host in (name, one.shares))
    processes = roles[host].processes
    return f"{processes} process{'es' * (processes > 1)} of {named}"


def _check_device(launch: Launch, joined: bool) -> None:
    """Refuse a run on CPUs that nobody has asked for, on a cluster with GPUs: it was planned where there are none."""
    unasked = joined and not launch.device_is_asked and launch.device == "cpu"
    if unasked and (gpus := count_gpus()):
        raise PlacementError(
            "cluster.device is auto, and the run was planned for CPUs, by the machine of this process; the cluster "
            f"has {gpus} GPU{'s' if gpus > 1 else ''}: set cluster.device=cuda, or cpu to leave them alone"
        )


def _connected(
    launch: Launch,
    role: RolePlan,
    actor: WorkerGroup,
    rollout: RolloutFleet,
    probe: Sequence[Sequence[int]],
    stack: ExitStack,
) -> WeightSync:
    """The way of the actor's weights to the rollout, which the stack closes."""
    tolerance = {} if launch.effect_tolerance is None else {"effect_tolerance": launch.effect_tolerance}
    sync = WeightSync(
        actor,
        rollout,
        role.transport or "",
        bucket_bytes=BUCKET_BYTES,
        timeout=launch.call_seconds,
        effect_check_every=role.effect_check_every,
        **tolerance,
        probe=[list(map(int, tokens)) for tokens in probe],
    )
    sync.connect()
    stack.callback(sync.close)
    rollout.catch_up = sync.catch_up
    return sync


def _pool(launch: Launch, host: str, roles: Mapping[str, RolePlan], room: Room | None) -> ResourcePool:
    """The places of a role that has processes of its own, on as few nodes as there must be."""
    role, guests = roles[host], [one for one in roles.values() if one.devices_of == host]
    gpus = role.gpus if launch.device == "cuda" else 0
    together = max([1, *(one.gpus for one in guests)]) if gpus else 1
    spread = [role.processes] if room is None else room.take(role.processes, gpus, 1 + bool(guests), together)
    return ResourcePool(
        spread,
        gpus_per_process=gpus,
        guests=int(bool(guests)),
        timeout=launch.start_seconds,
        name=host,
    )


@contextmanager
def _colocated(
    launch: Launch, host: str, roles: Mapping[str, RolePlan], pool: ResourcePool
) -> Iterator[dict[str, WorkerGroup]]:
    """A role that has processes of its own, and those that share them."""
    specs = {name: _spec(one) for name, one in roles.items() if host in (name, one.shares)}
    groups: dict[str, WorkerGroup] = {}
    try:
        groups = colocate(
            pool,
            specs,
            name="+".join(specs),
            launcher=launch.launcher,
            timeout=launch.call_seconds,
            start_timeout=launch.start_seconds,
            seed=launch.seed,
            device=launch.device,
            threads=_threads(launch),
        )
        yield dict(groups)
    finally:
        for group in groups.values():
            group.shutdown()


def _fleet(
    launch: Launch, name: str, role: RolePlan, pools: Mapping[str, ResourcePool], room: Room | None
) -> RolloutFleet:
    """Replicas in processes of their own, on places of their own or as guests of a role's."""
    gpus = role.gpus if launch.device == "cuda" else 0
    places: ResourcePool | Sequence[ResourcePool]
    if role.devices_of is not None:
        places = pools[role.devices_of].guests(max(gpus, 1), role.processes)
    else:
        spread = [role.processes] if room is None else room.take(role.processes, gpus)
        places = ResourcePool(spread, gpus_per_process=gpus, timeout=launch.start_seconds, name=name)
    return RolloutFleet(
        _spec(role),
        role.processes,
        name=name,
        launcher=launch.launcher,
        places=places,
        timeout=launch.call_seconds,
        start_timeout=launch.start_seconds,
        seed=launch.seed,
        device="cuda" if gpus else "cpu",  # servers that run already, somewhere, need none here
        threads=_threads(launch),
        samples_in_flight=samples_in_flight(role.options.get("max_running")),
    )


def _threads(launch: Launch) -> int:
    """Threads of numeric libraries in each process."""
    if launch.threads is not None or launch.device == "cpu" or launch.launcher == "inline":
        return launch.threads or 1
    return min(cores_per_gpu(), MOST_THREADS)


def _spec(role: RolePlan) -> WorkerSpec:
    """A role's worker, under the interpreter of its runtime."""
    if role.kind == "train":
        spec = WorkerSpec(TrainWorker, role.backend, role.model, role.options)
    else:
        takes_turns = role.devices_of is not None
        spec = WorkerSpec(RolloutWorker, role.backend, role.model, role.options, takes_turns=takes_turns)
    interpreter = role.interpreter
    return spec.options(python=interpreter.python, env=interpreter.env, variables=insert_variables(role.env))
