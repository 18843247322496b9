"""Detached groups: how their actors are called, what each of them knows of its group, and finding them again."""

from __future__ import annotations

import pickle
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from enginehouse.controller.cluster import is_owned
from enginehouse.controller.errors import ControllerError
from enginehouse.controller.launchers.host import Facts
from enginehouse.controller.launchers.interface import LaunchOptions
from enginehouse.controller.placement_group import remove, reservation_name
from enginehouse.controller.pool import Occupation, ResourcePool
from enginehouse.controller.worker import WorkerSpec

NAMESPACE = "enginehouse"
"""The namespace of Ray in which all detached groups are, whatever namespace a program joined."""

NOTICE_SECONDS = 30.0
"""How long Ray gets to notice that processes have died."""


@dataclass(frozen=True, slots=True)
class Record:
    """What a program must know that attaches to a group; every rank keeps it, so that any of them may be gone.

    Attributes:
        roles: what lives in each process.
        options: how the processes were launched.
        pool: the arguments of `ResourcePool.of_placement_groups`.
    """

    roles: Mapping[str, WorkerSpec]
    options: LaunchOptions
    pool: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Found:
    """A detached group that runs.

    Attributes:
        record: what it was made with.
        occupation: its places.
        actors: each rank's actor, None for one that is gone.
        facts: where the ranks are that answered.
        missing: ranks that are gone or do not answer.
        wrong: what is wrong with it, in words; empty if nothing is.
    """

    record: Record
    occupation: Occupation
    actors: list[Any]
    facts: Mapping[int, Facts]
    missing: Sequence[int]
    wrong: str


def record(pool: ResourcePool, roles: Mapping[str, WorkerSpec], options: LaunchOptions) -> bytes:
    """The record of a group whose places are reserved."""
    from ray import cloudpickle

    return cloudpickle.dumps(Record(roles, options, pool.as_found_again()))


def actor_options(group: str, rank: int) -> dict[str, Any]:
    """Ray's options of one rank's actor."""
    return {"name": f"{group}/{rank}", "namespace": NAMESPACE, "lifetime": "detached"}


def name_taken(group: str) -> ControllerError:
    """What to say where a group of that name is there already."""
    return ControllerError(
        f"a detached group {group!r} exists on this cluster: use it with WorkerGroup.attach({group!r}), end it "
        f"with WorkerGroup.attach({group!r}).shutdown(), or choose another name"
    )


def existing() -> dict[str, list[int]]:
    """The detached groups of this cluster, and which of their ranks live."""
    import ray

    found: dict[str, list[int]] = {}
    for actor in ray.util.list_named_actors(all_namespaces=True):
        group, _, rank = actor["name"].rpartition("/")
        if actor["namespace"] == NAMESPACE and group and rank.isdigit():
            found.setdefault(group, []).append(int(rank))
    return {group: sorted(ranks) for group, ranks in found.items()}


def make_room(group: str) -> None:
    """See that a detached group can be launched; give back what is left of one whose processes are all gone.

    Raises:
        ControllerError: this program owns its Ray, so that nothing can outlive it, or the name is taken.
    """
    from ray.util import placement_group_table

    _refuse_without_ray(group)
    if is_owned():
        raise ControllerError(
            f"{group!r} cannot be detached: Ray was started by this program and ends with it. Start a cluster first "
            "(`ray start --head`) and join it with start_ray('auto')"
        )
    if _lives(group):
        raise name_taken(group)
    left = [
        key
        for key, table in placement_group_table().items()
        if table["name"] == reservation_name(group) and table["state"] != "REMOVED"
    ]
    remove([_placement_group(key) for key in left])


def was_replaced(group: str, actors: Sequence[Any]) -> bool:
    """Whether other actors live under a group's names by now: another program restarted it, or launched it anew.

    Args:
        group: its name.
        actors: each rank's actor as this program knows it, None for one that was gone.
    """
    import ray

    if not ray.is_initialized():
        return False
    ours = {actor._actor_id for actor in actors if actor is not None}
    named = _actors(group, existing().get(group, ()))
    # those of a restart that failed here keep their names for a moment
    return _any_lives({rank: actor for rank, actor in named.items() if actor._actor_id not in ours})


def wait_until_gone(group: str, timeout: float) -> None:
    """Wait until Ray gave the names of ended actors free.

    Raises:
        ControllerError: it did not within `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    while (left := existing().get(group)) is not None:
        if time.monotonic() > deadline:
            raise ControllerError(f"rank(s) {left} of {group!r} were ended, and Ray still has them after {timeout:g} s")
        time.sleep(0.05)


def find(group: str, timeout: float) -> Found:
    """Find a detached group, and ask its ranks where they are.

    Raises:
        ControllerError: there is none of that name, or none of its ranks says what it is within `timeout` seconds.
    """
    _refuse_without_ray(group)
    groups = existing()
    if group not in groups:
        there = f"there are {', '.join(map(repr, sorted(groups)))}" if groups else "there is none"
        raise ControllerError(
            f"no detached group {group!r} on this cluster; {there}. A group is made so that others can attach to it by "
            "WorkerGroup(..., detached=True)"
        )
    deadline = time.monotonic() + timeout
    actors = _actors(group, groups[group])
    asked = {rank: (actor.record.remote(), actor.facts.remote()) for rank, actor in actors.items()}
    records, dead = _answers({rank: ref for rank, (ref, _) in asked.items()}, deadline)
    facts, _ = _answers({rank: ref for rank, (_, ref) in asked.items()}, deadline)
    if len(dead) == len(asked):
        raise ControllerError(f"all processes of the detached group {group!r} have died; launch it anew")
    if not records:
        raise ControllerError(f"no rank of the detached group {group!r} answered within {timeout:g} s")
    known = _unpickled(group, next(iter(records.values())))
    pool = ResourcePool.of_placement_groups(**known.pool)
    ranks = range(pool.world_size)
    missing = [rank for rank in ranks if rank not in facts]
    wrong = f"rank(s) {', '.join(map(str, missing))} were gone when this program attached to it" if missing else ""
    unbuilt = [rank for rank, fact in facts.items() if not fact.built]
    if unbuilt and not missing:
        missing = unbuilt
        wrong = f"rank(s) {', '.join(map(str, unbuilt))} were not built yet: its start goes on, or was cut short"
    occupation = pool.occupy_what_is_there(group)
    return Found(known, occupation, [actors.get(rank) for rank in ranks], facts, missing, wrong)


def _refuse_without_ray(group: str) -> None:
    import ray

    if not ray.is_initialized():
        raise ControllerError(
            f"{group!r}: this program has not joined a cluster; call enginehouse.controller.start_ray('auto') first"
        )


def _lives(group: str) -> bool:
    """Whether any process of a group lives: Ray keeps the names of dead ones until it has noticed."""
    if _any_lives(_actors(group, existing().get(group, ()))):
        return True
    wait_until_gone(group, NOTICE_SECONDS)
    return False


def _any_lives(actors: Mapping[int, Any]) -> bool:
    refs = {rank: actor.ping.remote() for rank, actor in actors.items()}
    _, dead = _answers(refs, time.monotonic() + NOTICE_SECONDS)
    return len(dead) < len(actors)


def _actors(group: str, ranks: Sequence[int]) -> dict[int, Any]:
    import ray

    found = {}
    for rank in ranks:
        with suppress(ValueError):  # it ended just now
            found[rank] = ray.get_actor(f"{group}/{rank}", namespace=NAMESPACE)
    return found


def _answers(refs: Mapping[int, Any], deadline: float) -> tuple[dict[int, Any], set[int]]:
    """What ranks said until the deadline, and which of them are dead."""
    import ray

    answers: dict[int, Any] = {}
    dead: set[int] = set()
    for rank, ref in refs.items():
        try:
            answers[rank] = ray.get(ref, timeout=max(deadline - time.monotonic(), 0.1))
        except ray.exceptions.RayActorError:
            dead.add(rank)
        except ray.exceptions.GetTimeoutError:
            continue
    return answers, dead


def _unpickled(group: str, packed: bytes) -> Record:
    try:
        return pickle.loads(packed)
    except Exception as error:
        raise ControllerError(
            f"cannot attach to {group!r}: its worker classes cannot be imported here ({type(error).__name__}: "
            f"{error}); make the modules importable that define them"
        ) from error


def _placement_group(key: str) -> Any:
    from ray import PlacementGroupID
    from ray.util.placement_group import PlacementGroup

    return PlacementGroup(PlacementGroupID(bytes.fromhex(key)))
