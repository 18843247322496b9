"""Places roles on processes, for any training loop: starts groups and fleets, and connects actor and rollout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from enginehouse.controller import Balanced, ResourcePool, WorkerGroup, WorkerSpec, colocate, start_ray
from enginehouse.controller.errors import PlacementError
from enginehouse.controller.placement_group import Room, cores_per_gpu, count_gpus
from enginehouse.fleet.fleet import RolloutFleet, samples_in_flight
from enginehouse.plugin import RolloutBackend, plugins
from enginehouse.plugin.capabilities import DEVICE_CHECKSUMS
from enginehouse.plugin.secrets import insert_variables
from enginehouse.roles.device_turns import PARAMS, DeviceTurns
from enginehouse.roles.role_plan import default_tolerance, own_processes
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
"""Maximum number of threads of a process with a GPU. Its host work (AdamW of offloaded state) gains little from
more."""


@dataclass(frozen=True)
class Roles:
    """The started roles of a run.

    Attributes:
        weights: sends the actor's weights to the rollout; None if no role generates, or no role is trained.
    """

    plans: Mapping[str, RolePlan]
    groups: Mapping[str, WorkerGroup]
    fleets: Mapping[str, RolloutFleet]
    turns: DeviceTurns
    weights: WeightSync | None = None

    @property
    def actor(self) -> WorkerGroup:
        return self.groups["actor"]

    @property
    def trained(self) -> dict[str, WorkerGroup]:
        """Worker groups that the loop updates and whose state it saves, by role."""
        return {name: self.groups[name] for name, plan in self.plans.items() if plan.trained}

    @property
    def rollout(self) -> RolloutFleet:
        """Fleet that answers the prompts of a step."""
        return self.fleets["rollout"]

    @property
    def sync(self) -> WeightSync:
        """Weight sync of a run that has an actor and a rollout."""
        assert self.weights is not None
        return self.weights

    def describe(self) -> dict[str, Any]:
        """Describe each role's processes, for reports."""
        roles: dict[str, WorkerGroup | RolloutFleet] = {**self.groups, **self.fleets}
        return {name: roles[name].call("describe") for name in self.plans}

    def score_by_reference(self, batch: Batch | DistributedBatch, outputs: Outputs) -> DistributedBatch:
        """Compute columns `reference_...` of `batch` with the role `reference`, or with the actor without adapters."""
        balanced = Balanced(batch, by="input_ids")
        if reference := self.groups.get("reference"):
            return reference.forward(balanced, outputs, "reference_")
        return self.actor.forward_base(balanced, outputs, "reference_")

    def prepare_evaluation(self) -> RolloutFleet:
        """Return the fleet for validation prompts, with the weights that the rollout serves."""
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
    came: Callable[[str], None] = lambda part: None,
) -> Iterator[Roles]:
    """Start the workers of all roles, and end them at exit.

    Args:
        roles: plan of each role, by name. Roles that share processes are built in this order.
        probe: token sequences for the effect check of weight updates.
        came: called with a description when a role's processes have started, and when a rollout engine is loaded.
    """
    with ExitStack() as stack:
        room = None
        if launch.launcher == "ray":
            cluster = stack.enter_context(start_ray(launch.address))
            came("Ray")
            _check_device(launch, joined=not cluster.owned)
            room = Room.of_cluster()
        groups: dict[str, WorkerGroup] = {}
        fleets: dict[str, RolloutFleet] = {}
        pools: dict[str, ResourcePool] = {}
        for name, role in own_processes(roles).items():  # hosts before the roles that share their processes
            if role.kind == "rollout":
                fleets[name] = _start_fleet(launch, name, role, pools, room)
                stack.callback(fleets[name].shutdown)
            else:
                pools[name] = _make_pool(launch, name, roles, room)
                stack.callback(pools[name].shutdown)
                groups |= stack.enter_context(_colocate(launch, name, roles, pools[name]))
            came(_describe_processes(roles, name))
        for name, role in roles.items():
            if role.kind == "rollout" and name in groups:
                fleets[name] = RolloutFleet.from_group(groups.pop(name))
                stack.callback(fleets[name].shutdown)
        turns = DeviceTurns.from_roles(roles, groups, fleets)
        turns.start()
        for name, fleet in fleets.items():
            fleet.tokens_stay = launch.tokens_stay
            if roles[name].devices_of is None:
                fleet.launch()
                came(f"the engine of {name}")
        sync = None
        if "rollout" in fleets and "actor" in groups:
            if launch.effect_tolerance is None:
                launch = replace(launch, effect_tolerance=default_tolerance(roles))
            sync = _connect(launch, roles["rollout"], groups["actor"], fleets["rollout"], probe, stack)
            turns.take_part(sync)
        yield Roles(roles, groups, fleets, turns, sync)


def _residents(roles: Mapping[str, RolePlan], host: str) -> dict[str, RolePlan]:
    """Return the role `host` and the roles that share its processes."""
    return {name: role for name, role in roles.items() if host in (name, role.shares)}


def _describe_processes(roles: Mapping[str, RolePlan], host: str) -> str:
    processes = roles[host].processes
    return f"{processes} process{'es' * (processes > 1)} of {', '.join(_residents(roles, host))}"


def _check_device(launch: Launch, joined: bool) -> None:
    """Reject a run that was planned for CPUs only because this machine has no GPU, if the cluster has GPUs."""
    unasked = joined and not launch.device_is_asked and launch.device == "cpu"
    if unasked and (gpus := count_gpus()):
        raise PlacementError(
            "cluster.device is auto, and the run was planned for CPUs, because this machine has no GPU; the cluster "
            f"has {gpus} GPU{'s' if gpus > 1 else ''}: set cluster.device=cuda, or cpu to leave them unused"
        )


def _connect(
    launch: Launch,
    role: RolePlan,
    actor: WorkerGroup,
    rollout: RolloutFleet,
    probe: Sequence[Sequence[int]],
    stack: ExitStack,
) -> WeightSync:
    """Connect the actor's weights to the rollout. The stack closes the connection."""
    tolerance = {} if launch.effect_tolerance is None else {"effect_tolerance": launch.effect_tolerance}
    record = plugins().get(RolloutBackend, role.backend, elsewhere=True)
    sync = WeightSync(
        actor,
        rollout,
        role.transport or "",
        bucket_bytes=BUCKET_BYTES,
        timeout=launch.call_seconds,
        effect_check_every=role.effect_check_every,
        **tolerance,
        probe=[list(map(int, tokens)) for tokens in probe],
        lends=role.shares == "actor",
        sums_in_place=launch.device == "cuda" and DEVICE_CHECKSUMS in record.capabilities,
        adapter=role.model.adapter is not None,
    )
    sync.connect()
    stack.callback(sync.close)
    rollout.catch_up = sync.catch_up
    return sync


def _make_pool(launch: Launch, host: str, roles: Mapping[str, RolePlan], room: Room | None) -> ResourcePool:
    """Reserve places for a role with separate processes, on as few nodes as possible."""
    role, guests = roles[host], [guest for guest in roles.values() if guest.devices_of == host]
    gpus = role.gpus if launch.device == "cuda" else 0
    together = max([1, *(guest.gpus for guest in guests)]) if gpus else 1
    spread = [role.processes] if room is None else room.take(role.processes, gpus, 1 + bool(guests), together)
    return ResourcePool(
        spread, gpus_per_process=gpus, guests=int(bool(guests)), timeout=launch.start_seconds, name=host
    )


@contextmanager
def _colocate(
    launch: Launch, host: str, roles: Mapping[str, RolePlan], pool: ResourcePool
) -> Iterator[dict[str, WorkerGroup]]:
    """Start a role with separate processes, and the roles that share them."""
    specs = {name: _make_spec(role) for name, role in _residents(roles, host).items()}
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
            threads=_choose_threads(launch),
        )
        yield dict(groups)
    finally:
        for group in groups.values():
            group.shutdown()


def _start_fleet(
    launch: Launch, name: str, role: RolePlan, pools: Mapping[str, ResourcePool], room: Room | None
) -> RolloutFleet:
    """Start replicas in separate processes. They get their own cores and GPUs, or they take turns with the role
    `devices_of` on its GPUs."""
    gpus = role.gpus if launch.device == "cuda" else 0
    places: ResourcePool | Sequence[ResourcePool]
    if role.devices_of is not None:
        places = pools[role.devices_of].guests(max(gpus, 1), role.processes)
    else:
        spread = [role.processes] if room is None else room.take(role.processes, gpus)
        places = ResourcePool(spread, gpus_per_process=gpus, timeout=launch.start_seconds, name=name)
    return RolloutFleet(
        _make_spec(role),
        role.processes,
        name=name,
        launcher=launch.launcher,
        places=places,
        timeout=launch.call_seconds,
        start_timeout=launch.start_seconds,
        seed=launch.seed,
        device="cuda" if gpus else "cpu",  # running servers elsewhere need no GPU here
        threads=_choose_threads(launch),
        samples_in_flight=samples_in_flight(role.options.get("max_running")),
    )


def _choose_threads(launch: Launch) -> int:
    if launch.threads is not None or launch.device == "cpu" or launch.launcher == "inline":
        return launch.threads or 1
    return min(cores_per_gpu(), MOST_THREADS)


def _make_spec(role: RolePlan) -> WorkerSpec:
    """Return the spec of a role's worker, with the interpreter of its runtime."""
    if role.kind == "train":
        spec = WorkerSpec(TrainWorker, role.backend, role.model, role.options)
    else:
        takes_turns = role.devices_of is not None
        spec = WorkerSpec(RolloutWorker, role.backend, role.model, role.options, takes_turns=takes_turns)
    interpreter = role.interpreter
    return spec.options(
        python=interpreter.python,
        env=interpreter.env,
        variables=insert_variables(role.env),
        reads=[role.model.path],
    )
