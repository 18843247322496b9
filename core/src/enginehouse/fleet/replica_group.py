"""Rollout replicas called as one: who of them lives, which weights they serve, and when one may start its engine.

Which replica draws which request is `enginehouse.fleet.router`.
"""

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
from enginehouse.fleet.replica import Replica, nobody_left

if TYPE_CHECKING:
    from enginehouse.engines.rollout import Health

log = logging.getLogger(__name__)

HEALTH_EVERY_SECONDS = 15.0
"""How often replicas are asked whether they live."""
HEALTH_SECONDS = 60.0
"""How long a replica may take to say so."""


class ReplicaGroup:
    """Replicas of a rollout engine, each in a process that may die alone; or ranks of a group, which share a fate.

    Further arguments are those of `RolloutFleet`.

    Args:
        ranks: those that share a fate.
        apart: whether a replica may die alone, and is started again.

    Attributes:
        catch_up: brings returned replicas to the version served (`WeightSync.catch_up`); without it they wait for the
            next update.
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
            Replica(member.number, member.group, member.number) for member in (ranks.members if ranks else ())
        ]
        self._supervisor = Supervisor(self._replicas, restarts, "drawing anything", self._begin, lambda _: self._tell())
        self._lock, self._closing = self._supervisor.lock, self._supervisor.closing
        self._change = threading.Condition(self._lock)
        self._catching_up = False
        self._launches_allowed, self._launches_alone, self._launching = True, False, 0
        self._engine_metrics: dict[str, float] = {}
        self._version: int | None = None  # newest that was verified; None before the first update

    # What it is

    @property
    def world_size(self) -> int:
        """Number of replicas, whatever became of them."""
        return len(self._replicas)

    @property
    def pids(self) -> list[int]:
        """Each replica's process id, on its node."""
        return [replica.group.pids[replica.rank] for replica in self._replicas]

    @property
    def states(self) -> list[State]:
        """What each replica is good for."""
        return [replica.state for replica in self._replicas]

    def describe(self) -> list[dict[str, Any]]:
        """What runs in each replica, for reports; of one that is gone, why."""
        living = self._living()
        numbers = [member.number for member in living.members]
        described = dict(zip(numbers, living.call("describe").result(), strict=True))
        return [
            described.get(replica.number) or {"rank": replica.number, "state": replica.state, "died": replica.death}
            for replica in self._replicas
        ]

    # Calling all

    def launch(self) -> list[str]:
        """Start every replica's engine, look after them from then on, and return each engine's name and version."""
        engines = self._living().call("launch", timeout=self._start_timeout).result()
        if self._apart:
            threading.Thread(target=self._look_after, name=f"{self.name}-health", daemon=True).start()
        return engines

    def call(
        self, method: str, *args: Any, timeout: float | None = None, blocking: bool | None = None, **kwargs: Any
    ) -> Any:
        """Call a method, registered with the mode `one_to_all`, on every replica that lives; see `WorkerGroup.call`.

        Returns:
            One result a replica, in their order; what `Members.call` returns if not blocking.
        """
        if method == "describe":
            return self.describe()
        gathered = self._living().call(method, *args, timeout=timeout, **kwargs)
        return gathered if blocking is False else gathered.result()

    def weight_state(self) -> list[Any]:
        """See `RolloutWorker.weight_state`; one result a replica that lives."""
        return self._living().call("weight_state").result()

    # Memory, where others use the devices too; see `enginehouse.roles.turns`

    @property
    def serves(self) -> bool:
        """Whether a replica takes requests."""
        return any(replica.state == "serving" for replica in self._replicas)

    def sleep(self, tags: tuple[str, ...], timeout: float | None = None) -> list[int | None]:
        """Have every replica that lives free memory, of the kinds `tags`, whatever it is at."""
        return self._call_living("sleep", tags, timeout=timeout)

    def wake_up(self, tags: tuple[str, ...]) -> None:
        """Have every replica that lives take memory back."""
        self._call_living("wake_up", tags)

    def profiled(self, method: str, *args: Any) -> list[Any]:
        """Have every replica that lives begin or end a profile; see `enginehouse.roles.profiles`."""
        return self._call_living(method, *args)

    def abort(self, timeout: float | None = None) -> None:
        """End all that replicas draw."""
        self._call_living("abort", timeout=timeout)

    def _call_living(self, method: str, *args: Any, timeout: float | None = None) -> list[Any]:
        """Call every replica that lives; None stands for one that is lost by it. Nothing where none is left: one may be
        coming back, and who waits for it is told if none is."""
        living = self._living()
        if not living.members:
            return []
        try:
            return living.call(method, *args, timeout=timeout, leave_out_lost=True).result()
        except Exception:
            if self._living().members:
                raise
            return []

    @property
    def lives(self) -> bool:
        """Whether a replica is there, with weights or without."""
        return bool(self._living().members)

    def allow_launches(self, allowed: bool, until: float | None = None, alone: bool = False) -> None:
        """Whether replicas that are started again may start their engines, which fills their devices. Else they wait,
        and those that have begun are waited for.

        Args:
            allowed: whether they may.
            until: no longer than then, by `time.monotonic()`.
            alone: whether they may all the same where none lives, as nobody else would end the wait for one.
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
                or (self._launches_alone and not self._living().members)
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
        """Those that live, each asked just now; if there are none, the first that comes back.

        Raises:
            ReplicasLost: there are none, and none is being started again.
        """
        if self._ranks is not None:
            return self._ranks
        self._check_health()
        while not (living := self._living()).members:
            if not any(replica.comes_back for replica in self._replicas):
                raise nobody_left(self.name, self._replicas)
            with self._lock:  # a restart has deadlines
                self._change.wait(LOOK_SECONDS)
        return living

    def confirmed(self, members: Members, version: int) -> None:
        """These serve `version`, verified: those that came back take rows again."""
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
        self._tell()

    def _living(self) -> Members:
        if self._ranks is not None:
            return self._ranks
        with self._lock:
            members = [replica.member for replica in self._replicas if replica.state in ("serving", "returned")]
        return Members(self.name, members, self.is_lost)

    def _begin_to_catch_up(self) -> bool:
        """Bring a replica that came back to the version served, in the background; False if there is nothing to do."""
        catch_up = self.catch_up
        ready = [replica for replica in self._replicas if replica.state == "returned" and not replica.waits]
        if self._catching_up or catch_up is None or not ready:
            return self._catching_up
        replica, member = ready[0], ready[0].member

        def bring() -> None:
            try:
                catch_up(Members(self.name, [member], self.is_lost))
            except Exception as error:
                replica.waits = True
                log.warning("%s waits for the next weight update: %s", member.group.name, error)
            finally:
                self._catching_up = False
                self._tell()

        self._catching_up = True
        threading.Thread(target=bring, name=f"{member.group.name}-weights", daemon=True).start()
        return True

    # Life and death

    def is_lost(self, member: Member, error: Exception | None) -> bool:
        """Whether a member is gone; if a call of it just showed that, it is noted and started again.

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
            illness = self._illness(member)
            if illness is None:
                return False
            error = illness
        with self._lock:
            if self._supervisor.lose(replica, member, first_line(error)):
                replica.version = None
                for other in self._replicas:  # what another waits for may have gone with this one
                    other.waits = False
        self._tell()
        return True

    def _illness(self, member: Member) -> Exception | None:
        """What is wrong with a replica's process or engine, if anything."""
        try:
            member.group.call("health", timeout=HEALTH_SECONDS)
        except Exception as error:
            if member.group.broken is not None or isinstance(error, RemoteError):
                return error
        return None

    def _check_health(self) -> None:
        """Ask every living replica whether it lives."""
        if not self._apart:
            return
        living = self._living()
        call = living.call("health", timeout=HEALTH_SECONDS, leave_out_lost=True)
        try:
            healths: list[Health] = [health for health in call.result() if health is not None]
        except Exception as error:  # those that died are noted; one that is merely slow is no news
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

    def _begin(self, replica: Replica) -> str:
        """Start the engine of a replica whose process was started again."""
        with self._launch_allowed():
            replica.group.call("launch", timeout=self._start_timeout)
            with self._lock:  # within: who waits for launches to end has it sleep
                replica.state = "returned" if self._version is not None else "serving"
        return ", without weights yet"

    def _tell(self) -> None:
        """Wake who waits: something has happened to a replica."""
        with self._lock:
            self._change.notify_all()
