"""Calls rollout replicas as one; knows which live, which weights they serve, and when one may start its engine."""

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
"""Time between health checks of replicas."""
HEALTH_SECONDS = 60.0
"""Time limit of a replica's answer to one."""


class ReplicaGroup:
    """Replicas of a rollout engine, each in a process that may die separately; or ranks of a group, which share a fate.

    Further arguments are those of `RolloutFleet`.

    Args:
        ranks: ranks that share a fate.
        apart: True if a replica may die separately, and is started again.

    Attributes:
        catch_up: brings returned replicas to the version served (`WeightSync.catch_up`); None: they wait for the next
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
            self._replicas, restarts, "drawing anything", self._begin, lambda _: self._notify()
        )
        self._lock, self._closing = self._supervisor.lock, self._supervisor.closing
        self._change = threading.Condition(self._lock)
        self._catching_up = False
        self._launches_allowed, self._launches_alone, self._launching = True, False, 0
        self._engine_metrics: dict[str, float] = {}
        self._version: int | None = None  # newest that was verified; None before the first update

    @property
    def world_size(self) -> int:
        """Number of replicas, dead ones included."""
        return len(self._replicas)

    @property
    def pids(self) -> list[int]:
        """Process ids of the replicas, on their nodes."""
        return [replica.group.pids[replica.rank] for replica in self._replicas]

    @property
    def states(self) -> list[State]:
        """States of the replicas."""
        return [replica.state for replica in self._replicas]

    def describe(self) -> list[dict[str, Any]]:
        """Describe, for reports, each replica's processes, or its death."""
        living = self._find_living()
        numbers = [member.number for member in living.members]
        described = dict(zip(numbers, living.call("describe").result(), strict=True))
        return [
            described.get(replica.number) or {"rank": replica.number, "state": replica.state, "died": replica.death}
            for replica in self._replicas
        ]

    # Calls of all replicas

    def launch(self) -> list[str]:
        """Start every replica's engine and the health checks, and return each engine's name and version."""
        engines = self._find_living().call("launch", timeout=self._start_timeout).result()
        if self._apart:
            threading.Thread(target=self._look_after, name=f"{self.name}-health", daemon=True).start()
        return engines

    def call(
        self, method: str, *args: Any, timeout: float | None = None, blocking: bool | None = None, **kwargs: Any
    ) -> Any:
        """Call a method of the mode `one_to_all` on every replica that lives; see `WorkerGroup.call`.

        Returns:
            A result per replica, in their order; what `Members.call` returns if not blocking.
        """
        if method == "describe":
            return self.describe()
        gathered = self._find_living().call(method, *args, timeout=timeout, **kwargs)
        return gathered if blocking is False else gathered.result()

    def weight_state(self) -> list[Any]:
        """Return the `RolloutWorker.weight_state` of each replica that lives."""
        return self._find_living().call("weight_state").result()

    # Memory of devices that other roles use too; see `enginehouse.roles.device_turns`

    @property
    def has_serving(self) -> bool:
        """True if a replica takes requests."""
        return any(replica.state == "serving" for replica in self._replicas)

    def sleep(self, tags: tuple[str, ...], timeout: float | None = None) -> list[int | None]:
        """Have every replica that lives free memory of the kinds `tags`; return the bytes of each."""
        return self.call_living("sleep", tags, timeout=timeout)

    def wake_up(self, tags: tuple[str, ...]) -> None:
        """Have every replica that lives take memory of the kinds `tags` back."""
        self.call_living("wake_up", tags)

    def abort(self, timeout: float | None = None) -> None:
        """Abort all requests of the replicas that live."""
        self.call_living("abort", timeout=timeout)

    def call_living(self, method: str, *args: Any, timeout: float | None = None) -> list[Any]:
        """Call every replica that lives; the result of a replica that this call loses is None.

        Returns nothing if none is left: one may be coming back, and whoever waits for it gets the error if none is.
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
        """Let restarted replicas start their engines, which fills their devices; or make them wait.

        Launches that have begun are waited for if they are not allowed any more.

        Args:
            allowed: True if they may start.
            until: end of that wait, by `time.monotonic()`.
            alone: True if they may start all the same while none lives, as nobody else would end the wait for one.
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

    # Weights; see `enginehouse.weights.sync.Replicas`

    def members(self) -> Members:
        """Return the replicas that live, after a health check; if there are none, wait for the first that comes back.

        Raises:
            ReplicasLost: there are none, and none is being started again.
        """
        if self._ranks is not None:
            return self._ranks
        self._check_health()
        while not (living := self._find_living()).members:
            if not any(replica.comes_back for replica in self._replicas):
                raise make_replicas_lost(self.name, self._replicas)
            with self._lock:  # a restart has deadlines
                self._change.wait(LOOK_SECONDS)
        return living

    def confirm(self, members: Members, version: int) -> None:
        """Let `members`, which were verified to serve `version`, take requests."""
        with self._lock:
            self._version = version
            for member in members.members:
                replica = self._replicas[member.number]
                if replica.incarnation != member.incarnation:
                    continue
                if replica.state == "returned":
                    log.info("%s serves weight version %d and takes rows again", member.group.name, version)
                replica.state, replica.waits, replica.version = "serving", False, version
            for replica in self._replicas:  # started again while the first version was on its way to the others
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
        """Bring a returned replica to the version served, in the background; return False if there is none."""
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

    # Life and death

    def is_lost(self, member: Member, error: Exception | None) -> bool:
        """Return True if a member is lost. Restart it if `error`, raised by a call of it, shows that.

        An exception of a call is a death only if the engine then does not answer `health`.
        """
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
                for sibling in self._replicas:  # what another waits for may have gone with this one
                    sibling.waits = False
        self._notify()
        return True

    def _find_illness(self, member: Member) -> Exception | None:
        """Return what is wrong with a replica's process or engine; None if it answers `health`."""
        try:
            member.group.call("health", timeout=HEALTH_SECONDS)
        except Exception as error:
            if member.group.broken is not None or isinstance(error, RemoteError):
                return error
        return None

    def _check_health(self) -> None:
        """Ask every replica for its health, so that dead replicas are noted, and keep the engines' metrics."""
        if not self._apart:
            return
        living = self._find_living()
        call = living.call("health", timeout=HEALTH_SECONDS, leave_out_lost=True)
        try:
            healths: list[Health] = [health for health in call.result() if health is not None]
        except Exception as error:  # dead replicas are noted; a slow one is no news
            log.debug("a replica of %s did not say how it is: %s", self.name, error)
            return
        by_name = {name: [health.metrics[name] for health in healths] for name in healths[0].metrics} if healths else {}
        self._engine_metrics = {f"rollout/{name}": sum(values) / len(values) for name, values in by_name.items()}

    def _look_after(self) -> None:
        while not self._closing.wait(self._health_every):
            try:
                self._check_health()
            except Exception:  # the next look may tell more; without looks a death goes unseen
                log.exception("the health of %s could not be asked for", self.name)

    def _begin(self, replica: FleetReplica) -> str:
        """Start the engine of a replica whose process was started again."""
        with self._launch_allowed():
            replica.group.call("launch", timeout=self._start_timeout)
            with self._lock:  # within: who waits for launches to end has it sleep
                replica.state = "returned" if self._version is not None else "serving"
        return ", without weights yet"

    def _notify(self) -> None:
        """Wake whoever waits for a change of a replica."""
        with self._lock:
            self._change.notify_all()
