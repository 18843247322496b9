"""Calls all rollout replicas together. Records which replicas live, their weights, and when they may start engines."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from enginehouse.controller.errors import RemoteError
from enginehouse.controller.members import GroupRanks, Member, Members
from enginehouse.controller.ray_access import LOOK_SECONDS
from enginehouse.controller.supervision import RESTARTS, State, Supervisor
from enginehouse.errors import first_line
from enginehouse.fleet.replica import FleetReplica, make_replicas_lost

if TYPE_CHECKING:
    from enginehouse.engines.rollout import Health

log = logging.getLogger(__name__)

HEALTH_EVERY_SECONDS = 15.0
HEALTH_SECONDS = 60.0
"""Time limit in seconds for a replica to answer a health check."""


class ReplicaGroup:
    """Replicas of a rollout engine that may die separately, or the ranks of a group, which end together.

    Further arguments are those of `RolloutFleet`.

    Args:
        ranks: the ranks of a group, each of which is a replica; None: replicas with separate processes.
        apart: True if a replica may die without the others, and is restarted.

    Attributes:
        catch_up: sends the served version to returned replicas (`WeightSync.catch_up`). None: they wait for the next
            update.
    """

    catch_up: Callable[[Members], None] | None = None

    def __init__(
        self,
        name: str,
        ranks: GroupRanks | None = None,
        *,
        apart: bool = False,
        restarts: int = RESTARTS,
        start_timeout: float | None = None,
        health_every: float = HEALTH_EVERY_SECONDS,
    ):
        self.name = name
        self._ranks, self._apart = ranks, apart
        self._start_timeout, self._health_every = start_timeout, health_every
        self._replicas = [
            FleetReplica(member.number, member.group, member.number) for member in (ranks.members if ranks else ())
        ]
        self._supervisor = Supervisor(
            self._replicas, restarts, "generating anything", self._begin, lambda _: self._notify()
        )
        self._lock, self._closing = self._supervisor.lock, self._supervisor.closing
        self._change = threading.Condition(self._lock)
        self._catching_up = False
        self._launches_allowed, self._launches_alone, self._launching = True, False, 0
        self._engine_metrics: dict[str, float] = {}
        self._version: int | None = None  # newest verified version; None before the first update

    @property
    def world_size(self) -> int:
        """Number of replicas, including dead replicas."""
        return len(self._replicas)

    @property
    def pids(self) -> list[int]:
        return [replica.group.pids[replica.rank] for replica in self._replicas]

    @property
    def states(self) -> list[State]:
        return [replica.state for replica in self._replicas]

    def describe(self) -> list[dict[str, Any]]:
        """Describe each replica's processes, or its death, for reports."""
        living = self._find_living()
        numbers = [member.number for member in living.members]
        described = dict(zip(numbers, living.call("describe").result(), strict=True))
        return [
            described.get(replica.number) or {"rank": replica.number, "state": replica.state, "died": replica.death}
            for replica in self._replicas
        ]

    def launch(self) -> list[str]:
        """Start every replica's engine and the health checks, and return the engines' names and versions."""
        engines = self._find_living().call("launch", timeout=self._start_timeout).result()
        if self._apart:
            threading.Thread(target=self._look_after, name=f"{self.name}-health", daemon=True).start()
        return engines

    def call(
        self, method: str, *args: Any, timeout: float | None = None, blocking: bool | None = None, **kwargs: Any
    ) -> Any:
        """Call a method of the mode `one_to_all` on every living replica; see `WorkerGroup.call`.

        Returns:
            One result per replica, in their order; the result of `Members.call` if `blocking` is False.
        """
        if method == "describe":
            return self.describe()
        gathered = self._find_living().call(method, *args, timeout=timeout, **kwargs)
        return gathered if blocking is False else gathered.result()

    def weight_state(self) -> list[Any]:
        """Return the `RolloutWorker.weight_state` of each living replica."""
        return self._find_living().call("weight_state").result()

    # Methods for devices that other roles use too; see `enginehouse.roles.device_turns`

    @property
    def has_serving(self) -> bool:
        """True if a replica takes requests."""
        return any(replica.state == "serving" for replica in self._replicas)

    def sleep(self, tags: tuple[str, ...], timeout: float | None = None) -> list[int | None]:
        """Free the memory of the kinds `tags` on every living replica, and return the freed bytes of each."""
        return self.call_living("sleep", tags, timeout=timeout)

    def wake_up(self, tags: tuple[str, ...]) -> None:
        """Allocate the memory of the kinds `tags` again on every living replica."""
        self.call_living("wake_up", tags)

    def abort(self, timeout: float | None = None) -> None:
        """Abort all requests of the living replicas."""
        self.call_living("abort", timeout=timeout)

    def call_living(self, method: str, *args: Any, timeout: float | None = None) -> list[Any]:
        """Call every living replica; the result is None for a replica that is lost during the call.

        If no replica is left, the result is an empty list instead of an error. A later call of `members` waits for a
        restart, and raises `ReplicasLost` if no replica can be restarted.
        """
        living = self._find_living()
        if not living.members:
            return []
        try:
            return living.call(method, *args, timeout=timeout, leave_out_lost=True).result()
        except Exception:
            if self._find_living().members:
                raise
            return []

    @property
    def has_living(self) -> bool:
        """True if a replica lives, with weights or without."""
        return bool(self._find_living().members)

    def allow_launches(self, allowed: bool, until: float | None = None, alone: bool = False) -> None:
        """Allow or forbid restarted replicas to start their engines, which fill their devices.

        If launches become forbidden, the call waits until running launches have ended.

        Args:
            until: time of `time.monotonic()` at which that wait ends; None: no limit.
            alone: True if engines may start in any case while no replica lives, because otherwise the wait for a
                replica would never end.
        """
        with self._change:
            self._launches_allowed, self._launches_alone = allowed, alone
            self._change.notify_all()
            while not allowed and self._launching and not self._closing.is_set():
                if until is not None and time.monotonic() >= until:
                    return
                self._change.wait(LOOK_SECONDS)

    @contextmanager
    def _launch_allowed(self) -> Iterator[None]:
        with self._change:
            while not (
                self._launches_allowed
                or self._closing.is_set()
                or (self._launches_alone and not self._find_living().members)
            ):
                self._change.wait(LOOK_SECONDS)
            self._launching += 1
        try:
            yield
        finally:
            with self._change:
                self._launching -= 1
                self._change.notify_all()

    # Methods of `enginehouse.weights.sync.Replicas`

    def members(self) -> Members:
        """Return the living replicas, after a health check. If none lives, wait for the first that returns. Raises
        `ReplicasLost` if none lives, and none is being restarted."""
        if self._ranks is not None:
            return self._ranks
        self._check_health()
        while not (living := self._find_living()).members:
            if not any(replica.comes_back for replica in self._replicas):
                raise make_replicas_lost(self.name, self._replicas)
            with self._lock:  # the wait ends, because a restart has deadlines
                self._change.wait(LOOK_SECONDS)
        return living

    def confirm(self, members: Members, version: int) -> None:
        """Send requests to `members`, which were verified to serve `version`."""
        with self._lock:
            self._version = version
            for member in members.members:
                replica = self._replicas[member.number]
                if replica.incarnation != member.incarnation:
                    continue
                if replica.state == "returned":
                    log.info("%s serves weight version %d and takes rows again", member.group.name, version)
                replica.state, replica.waits, replica.version = "serving", False, version
            for replica in self._replicas:  # replicas that restarted during the transfer of the first version
                if replica.state == "serving" and replica.version != version:
                    replica.state = "returned"
        self._notify()

    def _find_living(self) -> Members:
        if self._ranks is not None:
            return self._ranks
        with self._lock:
            members = [replica.member for replica in self._replicas if replica.state in ("serving", "returned")]
        return Members(self.name, members, self.is_lost)

    def _begin_to_catch_up(self) -> bool:
        """Send the served version to a returned replica, in the background. Return False if no replica needs it."""
        catch_up = self.catch_up
        ready = [replica for replica in self._replicas if replica.state == "returned" and not replica.waits]
        if self._catching_up or catch_up is None or not ready:
            return self._catching_up
        replica, member = ready[0], ready[0].member

        def bring_up() -> None:
            try:
                catch_up(Members(self.name, [member], self.is_lost))
            except Exception as error:
                replica.waits = True
                log.warning("%s waits for the next weight update: %s", member.group.name, error)
            finally:
                self._catching_up = False
                self._notify()

        self._catching_up = True
        threading.Thread(target=bring_up, name=f"{member.group.name}-weights", daemon=True).start()
        return True

    def is_lost(self, member: Member, error: Exception | None) -> bool:
        """Return True if a member is lost, and restart it. `error` is what a call of the member raised, if anything.
        An exception in the member's process counts as a loss only if the engine then does not answer `health`."""
        replica = self._replicas[member.number]
        if replica.incarnation != member.incarnation:
            return True
        if error is None or not self._apart or self._closing.is_set():
            return False
        if member.group.broken is None:
            if not isinstance(error, RemoteError):
                return False
            illness = self._find_illness(member)
            if illness is None:
                return False
            error = illness
        with self._lock:
            if self._supervisor.lose(replica, member, first_line(error)):
                replica.version = None
                for sibling in self._replicas:  # another replica may have waited because of this replica
                    sibling.waits = False
        self._notify()
        return True

    def _find_illness(self, member: Member) -> Exception | None:
        """Return the error of a replica's process or engine; None if it answers `health`."""
        try:
            member.group.call("health", timeout=HEALTH_SECONDS)
        except Exception as error:
            if member.group.broken is not None or isinstance(error, RemoteError):
                return error
        return None

    def _check_health(self) -> None:
        """Call `health` on every replica, to find dead replicas, and store the engines' metrics."""
        if not self._apart:
            return
        living = self._find_living()
        call = living.call("health", timeout=HEALTH_SECONDS, leave_out_lost=True)
        try:
            healths: list[Health] = [health for health in call.result() if health is not None]
        except Exception as error:  # dead replicas are restarted, and a slow replica is ignored
            log.debug("a replica of %s did not report its health: %s", self.name, error)
            return
        by_name = {name: [health.metrics[name] for health in healths] for name in healths[0].metrics} if healths else {}
        self._engine_metrics = {f"rollout/{name}": sum(values) / len(values) for name, values in by_name.items()}

    def _look_after(self) -> None:
        while not self._closing.wait(self._health_every):
            try:
                self._check_health()
            except Exception:  # the next check may succeed; without checks nobody sees a death
                log.exception("the health check of %s failed", self.name)

    def _begin(self, replica: FleetReplica) -> str:
        """Start the engine of a replica whose process was restarted."""
        with self._launch_allowed():
            replica.group.call("launch", timeout=self._start_timeout)
            with self._lock:  # inside the block, because `allow_launches` then lets it sleep
                replica.state = "returned" if self._version is not None else "serving"
        return ", without weights yet"

    def _notify(self) -> None:
        """Wake all threads that wait for a change of a replica."""
        with self._lock:
            self._change.notify_all()
