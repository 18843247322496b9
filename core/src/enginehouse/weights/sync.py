"""Brings the trainer's weights to rollout replicas, by any transport: verified, or not at all.

    pause -> start -> send || receive -> compare bytes -> finish -> compare what is served -> (effect) -> resume

*Bytes*: each parameter's checksum before it left is compared with its checksum at arrival, before any replica lets go
of the old version. If parameters leave in parts, from several ranks, the parts' checksums are compared, and the
replicas' checksums of the whole parameters with each other.
*Version*: each replica then reports its version and checksums; none answers a request with the new version before all
have reported.
*Effect*: each replica and the trainer score a few fixed token sequences, as some engines hold the right bytes and
compute with others. The scores must agree to within a tolerance; and their changes since they last agreed must too
(`enginehouse.weights.effect`), as a dropped update is far too small for any tolerance. Replicas that report checksums
are checked at the first update, the first that changes weights, and every so often; replicas that cannot, at every
update that changes weights.

If replicas can be lost one by one (`Replicas`), a replica that dies is left out; if it lacked bytes, the update is sent
again to the others. If all die, the first that comes back gets the update. A returned replica gets the version that is
served (`catch_up`), or the next one. Replicas of another engine get the served version too (`serve_on`).

The worker methods called here are those of `enginehouse.roles.workers`; any worker class that has them will do.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from enginehouse.controller.errors import ControllerError
from enginehouse.controller.group import WorkerGroup
from enginehouse.controller.members import Gathered, GroupRanks, Members
from enginehouse.engines.weights import WeightSyncError
from enginehouse.errors import first_line
from enginehouse.weights.checksums import compare_checksums
from enginehouse.weights.connection import WeightConnection, await_both, explain
from enginehouse.weights.effect_check import EffectCheck, rounding_of

if TYPE_CHECKING:
    from enginehouse.controller.future import Future
    from enginehouse.engines.rollout import PauseMode

log = logging.getLogger(__name__)


class Replicas(Protocol):
    """Rollout replicas, which may come and go, such as those of `enginehouse.fleet.fleet`."""

    name: str

    def members(self) -> Members:
        """Return the replicas that take weights now.

        Raises:
            ControllerError: there are none.
        """
        ...

    def confirm(self, members: Members, version: int) -> None:
        """Let `members`, without those lost since, answer with `version`, which they were verified to serve."""
        ...


@dataclass(frozen=True, slots=True)
class SyncReport:
    """A verified update.

    Attributes:
        version: the version that every replica serves now.
        seconds: time from the first call until the last replica was verified; resumption is not waited for.
        nbytes: bytes of the weights, counted once.
        effect: mean absolute difference in nats of the replica that differs most; None if it was not checked.
        taken: least share of the trainer's change of logprobs that a replica shows, 0.5 to 1; None if it was not
            checked, or the change is still too small to be distinguished from rounding.
        bytes_moved: bytes that the update brought to all replicas, if the transport says it.
        bytes_minimum: least bytes that it could have brought, if the transport says it.
        least_taken: the most of a change that a replica can have taken (`share_shown`): the least so far, of all
            replicas and updates.
    """

    version: int
    seconds: float
    nbytes: int
    effect: float | None
    taken: float | None = None
    bytes_moved: int | None = None
    bytes_minimum: int | None = None
    least_taken: float | None = None


@dataclass(frozen=True, slots=True)
class _Begun:
    """A transfer that waits for the trainer, begun at the time `at` by `time.monotonic()`."""

    version: int
    at: float


class WeightSync:
    """Brings a training group's weights to a rollout group.

    Args:
        train: workers with the methods of `TrainWorker`.
        rollout: replicas of workers with the methods of `RolloutWorker`.
        transport: name of a weight transport, or `"module:Class"`.
        bucket_bytes: most bytes to travel at once, but for larger parameters.
        timeout: time limit of each stage of an update, in seconds.
        effect_check_every: see `EffectCheck`, as for the next two.
        effect_tolerance: largest mean absolute difference of logprobs, in nats.
        probe: token sequences.
        lends: True if nothing is generated while the trainer trains, so that it may lend its tensors to replicas in its
            processes. Requests that come nevertheless are refused.

    Attributes:
        make_room: called before an update of all replicas, if both sides use the same devices.
        hand_over: called within such an update, once the trainer is not needed and before replicas compute anything.
    """

    make_room: Callable[[], None] | None = None
    hand_over: Callable[[], None] | None = None

    def __init__(
        self,
        train: WorkerGroup,
        rollout: Replicas,
        transport: str,
        *,
        bucket_bytes: int,
        timeout: float,
        effect_check_every: int = 50,
        effect_tolerance: float = 0.05,
        probe: Sequence[Sequence[int]] | None = None,
        lends: bool = False,
    ):
        self._connection = WeightConnection(GroupRanks(train), transport, bucket_bytes, timeout, lends)
        self._effect = EffectCheck(effect_check_every, effect_tolerance, probe or ())
        self._replicas = rollout
        self._served: tuple[int, Mapping[str, str]] | None = None  # version, checksum of each parameter
        self._timeout = timeout
        self._trainer = threading.RLock()  # held while the trainer is used
        self._open = False  # between `connect` and `close`
        self._tried = 0  # newest version tried
        self._begun: _Begun | None = None
        self._resuming: tuple[int, Future | Gathered] | None = None  # the last update's, not waited for

    def trainer_in_use(self) -> AbstractContextManager[Any]:
        """Return a context in which the caller uses the trainer, so that no replica is caught up (`catch_up`)."""
        return self._trainer

    @contextmanager
    def trainer_idle(self) -> Iterator[None]:
        """Within `trainer_in_use`, let replicas be caught up: the trainer has the served weights."""
        self._trainer.release()
        try:
            yield
        finally:
            self._trainer.acquire()

    def connect(self) -> None:
        """Plan the transfer and open both ends; call it again after a group was restarted.

        Raises:
            WeightSyncError: the two sides cannot reach each other by this transport, or a replica did not resume after
                the last update.
        """
        self._await_resumption()
        self._connect(self._replicas.members())
        self._open = True

    def _connect(self, receivers: Members, transport: str = "") -> None:
        self._effect.begin_connection()
        self._connection.open(receivers, transport)

    def begin(self, version: int) -> None:
        """Begin an update while the trainer is busy: it sends after its present call, and replicas pause now.

        `publish` continues from there, or `give_up` ends it; until then the trainer can take no other call. Call this
        when nothing is generated, and the trainer is busy for much less than the time limit of a stage. Nothing is
        begun if `publish` has something else to do first.
        """
        resumed = self._resuming is None or self._resuming[1].done()
        if self._connection.plan is None or self.make_room is not None or version <= self._tried or not resumed:
            return
        if self._has_all_receivers():
            self._begun = _Begun(version, time.monotonic())
            try:
                self._connection.begin_transfer(version, "wait")
            except ControllerError as error:  # what comes of the trainer's call says more
                log.info("weight update %d was not begun: %s", version, error)
                self.give_up()

    def give_up(self) -> None:
        """End an update that was begun, without waiting for the trainer."""
        if (begun := self._begun) is not None:
            self._connection.in_flight = ()
            self._abandon(begun)

    def _abandon(self, begun: _Begun) -> None:
        """Give up an update, so that its version may come again."""
        self._begun = None
        self._connection.abort(begun.version)
        self._connection.plan = None  # a connection takes no version that was given up

    def _take_over(self, version: int) -> _Begun | None:
        """Return the update that was begun if `publish` can go on with it; else give it up.

        Its deadlines count from its beginning, so at least half of the time must be left.
        """
        if (begun := self._begun) is None:
            return None
        in_time = time.monotonic() - begun.at < self._timeout / 2
        if begun.version == version and in_time and self._has_all_receivers():
            self._begun = None
            return begun
        self._abandon(begun)
        return None

    def publish(self, version: int, pause: PauseMode = "wait") -> SyncReport:
        """Make every replica serve the trainer's current weights as `version`.

        On return every replica was verified and told to answer with it. A replica that could not resume is an error
        of the next `publish` or `connect`.

        Args:
            version: larger than any tried before.
            pause: Treatment of requests in progress.

        Raises:
            WeightSyncError: naming the parameters and the replica. No replica answers a request with `version`.
                Replicas that have not switched go on with the version they had. A replica that has switched before
                the error answers nothing until a later update succeeds.
        """
        if not self._open:
            raise WeightSyncError("weights cannot be sent before the transport is connected")
        if version <= self._tried:
            raise WeightSyncError(f"weight version {version} is not newer than {self._tried}, which was tried before")
        self._await_resumption()
        self._tried = version
        called = time.perf_counter()
        begun = self._take_over(version)
        while True:
            if self.make_room is not None:
                self.make_room()
            if begun is None:
                self._connection.in_flight = ()
            started, staged = begun.at if begun else time.monotonic(), False
            receivers = self._connection.connected if begun else self._members_now(f"weight update {version} failed")
            try:
                if begun is None:
                    if self._connection.plan is None or receivers != self._connection.receivers:
                        self._connect(receivers)
                    self._connection.begin_transfer(version, pause)
                begun = None
                sent = self._connection.await_transfer()
                staged = True
                blind = self._connection.commit(version, sent)
                changed = self._served is not None and sent != self._served[1]
                effect, taken = self._finish(version, sent, self._effect.is_due(changed, blind))
                self._resume(version, self._replicas)
                break
            except BaseException as error:
                late = time.monotonic() - started >= self._timeout
                silent = self._connection.abort(version)
                if not isinstance(error, Exception):
                    raise
                if not _may_begin_anew(receivers, staged):
                    cause = silent if late and silent is not None else error  # who waited for it, says so first
                    raise explain(cause, f"weight update {version} failed") from error
                log.warning(
                    "weight update %d begins anew, with the replicas there are then: %s", version, first_line(error)
                )
        self._effect.note_update(changed, effect is not None)
        self._served = version, sent
        plan, nbytes, least = self._connection.plan, self._connection.nbytes, self._effect.least_taken
        moved = (None, None) if plan is None else (plan.bytes_moved, plan.bytes_minimum)
        return SyncReport(version, time.perf_counter() - called, nbytes, effect, taken, *moved, least)

    def catch_up(self, returned: Members) -> None:
        """Make returned replicas serve the version of the other replicas, verified in all three ways.

        Do not call this while the trainer's weights change. If they have changed since that version, nothing is
        served. The next `publish` goes to all replicas again.

        Raises:
            WeightSyncError: the replicas do not serve it, and wait for the next update.
        """
        self._send_served(returned, "", bool(self._effect.every), self._replicas, "a returned replica")

    def serve_on(self, replicas: Replicas, transport: str, check: bool = True) -> None:
        """Make replicas of another engine serve the version that the rollout serves, verified in all three ways.

        Do not call this while the trainer's weights change. The next `publish` goes to the rollout again.

        Args:
            replicas: replicas of another engine than the rollout's.
            transport: name of the weight transport to them, or `"module:Class"`.
            check: False if the effect is not compared, as for a backend that cannot score prompts.

        Raises:
            WeightSyncError: the replicas do not serve it, or did already.
        """
        self._send_served(replicas.members(), transport, check, replicas, replicas.name)

    def _send_served(self, members: Members, transport: str, check: bool, replicas: Replicas, whom: str) -> None:
        """Send the served version to `members` of `replicas`, which messages call `whom`."""
        connection = self._connection
        with self._trainer:
            if self._served is None:
                raise WeightSyncError(f"there is no version to bring to {whom}: no weight update has succeeded")
            self._await_resumption()
            version, sums = self._served
            connection.in_flight = ()
            try:
                self._connect(members, transport)
                connection.begin_transfer(version, "wait")
                sent = connection.await_transfer()
                changed = f"the trainer, whose weights are not those of version {version} any more,"
                compare_checksums(sums, sent, changed)
                connection.commit(version, sent)
                self._finish(version, sent, check and bool(self._effect.probe))
                self._resume(version, replicas)
                self._await_resumption()
            except BaseException as error:
                connection.abort(version)
                if not isinstance(error, Exception):
                    raise
                raise explain(error, f"weight version {version} could not be brought to {whom}") from error

    def close(self) -> None:
        """Close both ends, if they can be reached. Errors are logged: there is nothing to lose."""
        try:
            self._await_resumption()
        except WeightSyncError as error:
            receivers = self._connection.receivers
            all_lost = receivers is not None and len(receivers.lost) == receivers.world_size
            log.log(logging.INFO if all_lost else logging.WARNING, "%s", error)  # a death is told elsewhere
        self._open = False
        self._connection.close()

    def _members_now(self, what: str) -> Members:
        """Return the replicas that take weights now.

        Raises:
            WeightSyncError: none does, or will; it begins with `what`.
        """
        try:
            return self._replicas.members()
        except ControllerError as error:
            raise explain(error, what) from error

    def _has_all_receivers(self) -> bool:
        """Return True if the replicas that take weights now are those of the connection."""
        try:
            return self._replicas.members() == self._connection.receivers
        except ControllerError:
            return False

    def _resume(self, version: int, replicas: Replicas) -> None:
        """Let the replicas answer with the new version."""
        self._resuming = version, self._connection.call_remaining("resume_weights", version)
        replicas.confirm(self._connection.connected, version)

    def _await_resumption(self) -> None:
        """Wait until every replica answers again after the last update."""
        if self._resuming is None:
            return
        (version, resuming), self._resuming = self._resuming, None
        try:
            resuming.result()
        except Exception as error:
            raise explain(error, f"not every replica resumed after weight update {version}") from error

    def _finish(self, version: int, sums: Mapping[str, str], checked: bool) -> tuple[float | None, float | None]:
        """Hand over, check the effect of a served update if `checked`, and return `EffectCheck.compare`."""
        from enginehouse.data import Batch, Ragged
        from enginehouse.engines.train import Outputs

        connection, probe = self._connection, self._effect.probe
        computing: Any = None
        if checked:
            tokens = Batch({"input_ids": Ragged.from_list(probe)})
            computing = connection.call_later(connection.train, "forward", tokens, Outputs())
        if self.hand_over is not None:
            if computing is not None:
                computing.result()
            self.hand_over()
        if computing is None:
            return None, None
        scored = await_both(connection.call_remaining("score", probe), computing)
        column = computing.result()["logprobs"]
        expected = [column[row].tolist() for row in range(len(probe))]
        rounding = rounding_of(connection.plan.parameters if connection.plan is not None else ())
        return self._effect.compare(version, connection.connected, sums, expected, scored, rounding)


def _may_begin_anew(receivers: Members, staged: bool) -> bool:
    """Return True if a failed update may be tried again: replicas were lost, and no living one may have switched to it,
    which may happen once all of its bytes are `staged`."""
    lost = len(receivers.lost)
    return lost == receivers.world_size if staged else lost > 0
