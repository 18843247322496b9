"""The one state machine by which weights reach the rollout replicas, whatever the transport: verified, or not at all.

    pause -> start -> send || receive -> compare bytes -> finish -> compare what is served -> (effect) -> resume

*Bytes*: each parameter's checksum before it left is compared with its checksum where it arrived, before any replica
lets go of the old version; where it leaves in parts, from several ranks, each part's, and the checksums of the whole
parameters put together of them are compared among the replicas.
*Version*: each replica then says which version it serves, and with which checksums; none answers a request with the new
version before all have said it.
*Effect*: a few fixed token sequences are scored by each replica and by the trainer: engines exist that hold the right
bytes and compute with others. The two must agree to within a tolerance; and what has changed since they last did must
have changed in both (`enginehouse.weights.effect`), as an update that was dropped is far too small for any
tolerance. For replicas that say checksums of what they serve, at the first update, the first that changes weights, and
every so often; for those that cannot, whose word for the version is all there is, at every update that changes weights.

Where replicas can be lost one by one (`Replicas`), one that dies before it has all the bytes is left out and the update
is sent again to the others; one that dies later is left out. Where all die, the first that comes back gets it. One that
came back gets the version that is served (`catch_up`), or the next one. So do replicas of another engine that serve
beside those of the rollout (`serve_on`).

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

from enginehouse.controller.errors import (
    ControllerError,
)
from enginehouse.controller.group import WorkerGroup
from enginehouse.controller.members import Gathered, GroupRanks, Members
from enginehouse.engines.weights import WeightSyncError
from enginehouse.errors import first_line
from enginehouse.weights.checksums import compare_checksums
from enginehouse.weights.connection import Connection, await_both, explained
from enginehouse.weights.effect_check import EffectCheck, rounding_of

if TYPE_CHECKING:
    from enginehouse.controller.future import Future
    from enginehouse.engines.rollout import PauseMode

log = logging.getLogger(__name__)


class Replicas(Protocol):
    """Rollout replicas, which may come and go; those of `enginehouse.fleet.fleet`."""

    name: str

    def members(self) -> Members:
        """The replicas that take weights now.

        Raises:
            ControllerError: there are none.
        """
        ...

    def confirmed(self, members: Members, version: int) -> None:
        """Let `members`, without those lost since, answer with `version`, which they were verified to serve."""
        ...


@dataclass(frozen=True, slots=True)
class SyncReport:
    """A verified update.

    Attributes:
        version: what every replica serves now.
        seconds: from the first call until the last replica was verified; its resumption is not waited for.
        nbytes: bytes of the weights, counted once.
        effect: mean absolute difference in nats of the replica that differs most, where it was checked.
        taken: how much of the trainer's change of logprobs the replica that shows least of it shows, 0.5 to 1; None
            where it was not looked at, or the change is too small so far to be told from rounding.
        least_taken: the most of a change that a replica can have taken (`share_shown`): the least so far, of all
            replicas and updates.
        bytes_moved: what the update brought to the replicas in all, in bytes, where the transport says it.
        bytes_minimum: the least that could have been, where the transport says it.
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
    """A transfer that waits for the trainer.

    Attributes:
        version: its version.
        at: when it was begun, by `time.monotonic()`.
    """

    version: int
    at: float


class WeightSync:
    """Brings a training group's weights to a rollout group.

    Args:
        train: workers with the methods of `TrainWorker`.
        rollout: replicas of workers with the methods of `RolloutWorker`.
        transport: name of a weight transport, or `"module:Class"`.
        bucket_bytes: most bytes to travel at once, but for larger parameters.
        timeout: seconds any stage of an update may take.
        effect_check_every: compare logprobs at the first update, the first that changes weights, and every so many-th;
            with replicas that cannot be read back at every update that changes weights, whatever the number; 0 never.
        effect_tolerance: largest mean absolute difference of logprobs, in nats.
        probe: token sequences for the effect check; sequences of less than two tokens have nothing to compare.

    Attributes:
        make_room: called before an update of all replicas: where both sides use the same devices.
        hand_over: called within an update once the trainer is not needed any more, and before replicas compute
            anything: likewise.
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
    ):
        self._connection = Connection(GroupRanks(train), transport, bucket_bytes, timeout)
        self._effect = EffectCheck(effect_check_every, effect_tolerance, probe or ())
        self._replicas = rollout
        self._served: tuple[int, Mapping[str, str]] | None = None  # version, checksum of each parameter
        self._timeout = timeout
        self._trainer = threading.RLock()  # held by who uses the trainer
        self._open = False  # between `connect` and `close`
        self._tried = 0  # newest version tried
        self._begun: _Begun | None = None
        self._resuming: tuple[int, Future | Gathered] | None = None  # the last update's, not waited for

    def trainer_in_use(self) -> AbstractContextManager[Any]:
        """To be held by who calls the trainer: meanwhile nobody else is caught up (`catch_up`)."""
        return self._trainer

    @contextmanager
    def trainer_idle(self) -> Iterator[None]:
        """Within `trainer_in_use`: the trainer has the weights that are served, and replicas may be caught up."""
        self._trainer.release()
        try:
            yield
        finally:
            self._trainer.acquire()

    def connect(self) -> None:
        """Plan the transfer and open both ends. Again after a group was restarted.

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
        """Begin an update behind the call that the trainer is busy with: it sends once it has ended that, and replicas
        pause now. `sync` goes on from there, or `give_up` ends it; meanwhile the trainer takes no other call in.

        To be called where nothing is drawn, and the trainer is busy for much less than the time of a stage. Nothing is
        begun where `sync` has something else to do first.
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
        """End the update that was begun, if there is one, without waiting for the trainer."""
        if (begun := self._begun) is not None:
            self._connection.in_flight = ()
            self._abandon(begun)

    def _abandon(self, begun: _Begun) -> None:
        """Give up an update, so that its version may come again."""
        self._begun = None
        self._connection.abort(begun.version)
        self._connection.plan = None  # a connection takes no version that was given up

    def _takes_over(self, version: int) -> _Begun | None:
        """The update that was begun, if `sync` can go on with it; else it is given up. Half of the time is left to it
        at least: its deadlines count from when it was begun."""
        if (begun := self._begun) is None:
            return None
        in_time = time.monotonic() - begun.at < self._timeout / 2
        if begun.version == version and in_time and self._has_all_receivers():
            self._begun = None
            return begun
        self._abandon(begun)
        return None

    def sync(self, version: int, pause: PauseMode = "wait") -> SyncReport:
        """Make every replica serve the trainer's current weights as `version`.

        On return every replica was verified and told to answer with it. A replica that could not resume is an error
        of the next `sync` or `connect`.

        Args:
            version: larger than any tried before.
            pause: what becomes of requests under way.

        Raises:
            WeightSyncError: naming the parameters and the replica. No replica answers a request with `version`. Up to
                the comparison of bytes every replica goes on with the version it had; if it is a replica's switch, or
                what comes after, that failed, those that had not switched do so, and those that had answer nothing
                until a later update succeeds.
        """
        if not self._open:
            raise WeightSyncError("weights cannot be sent before the transport is connected")
        if version <= self._tried:
            raise WeightSyncError(f"weight version {version} is not newer than {self._tried}, which was tried before")
        self._await_resumption()
        self._tried = version
        called = time.perf_counter()
        begun = self._takes_over(version)
        while True:
            if self.make_room is not None:
                self.make_room()
            if begun is None:
                self._connection.in_flight = ()
            started, staged = begun.at if begun else time.monotonic(), False
            receivers = self._connection.connected if begun else self._members_now(f"weight update {version} failed")
            try:
                if begun is None:
                    self._follow_membership(receivers)
                    self._connection.begin_transfer(version, pause)
                begun = None
                sent = self._connection.transferred()
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
                    raise explained(cause, f"weight update {version} failed") from error
                log.warning(
                    "weight update %d begins anew, with the replicas there are then: %s", version, first_line(error)
                )
        self._effect.note_update(changed, effect is not None)
        self._served = version, sent
        plan, nbytes, least = self._connection.plan, self._connection.nbytes, self._effect.least_taken
        moved = (None, None) if plan is None else (plan.bytes_moved, plan.bytes_minimum)
        return SyncReport(version, time.perf_counter() - called, nbytes, effect, taken, *moved, least)

    def catch_up(self, returned: Members) -> None:
        """Make replicas that came back serve the version that the others serve, verified in all three ways.

        Not while the trainer's weights change. If they are not those of that version any more, nothing is served.
        The next `sync` goes to all replicas again.

        Raises:
            WeightSyncError: they do not serve it, and wait for the next update.
        """
        self._send_served(returned, "", bool(self._effect.every), self._replicas, "a returned replica")

    def serve_on(self, replicas: Replicas, transport: str, check: bool = True) -> None:
        """Make replicas of another engine serve the version that the rollout serves, verified in all three ways.

        Not while the trainer's weights change. The next `sync` goes to the rollout again.

        Args:
            replicas: beside those of the rollout.
            transport: name of the weight transport to them, or `"module:Class"`.
            check: whether the effect is compared; a backend that cannot score prompts has none to compare.

        Raises:
            WeightSyncError: they do not serve it; or they did already, which no one need ask for.
        """
        self._send_served(replicas.members(), transport, check, replicas, replicas.name)

    def _send_served(self, members: Members, transport: str, check: bool, replicas: Replicas, whom: str) -> None:
        """Send the version that is served to `members`, of `replicas`; messages call them `whom`."""
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
                sent = connection.transferred()
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
                raise explained(error, f"weight version {version} could not be brought to {whom}") from error

    def close(self) -> None:
        """Close both ends, as far as they still can be reached. What goes wrong is logged: there is nothing to lose."""
        try:
            self._await_resumption()
        except WeightSyncError as error:
            receivers = self._connection.receivers
            all_lost = receivers is not None and len(receivers.lost) == receivers.world_size
            log.log(logging.INFO if all_lost else logging.WARNING, "%s", error)  # a death is told elsewhere
        self._open = False
        self._connection.close()

    def _members_now(self, what: str) -> Members:
        """Who takes weights now.

        Raises:
            WeightSyncError: nobody does, or will; it begins with `what`.
        """
        try:
            return self._replicas.members()
        except ControllerError as error:
            raise explained(error, what) from error

    def _has_all_receivers(self) -> bool:
        """Whether those that take weights now are those of the connection."""
        try:
            return self._replicas.members() == self._connection.receivers
        except ControllerError:
            return False

    def _follow_membership(self, now: Members) -> None:
        """Connect anew where replicas were lost or came back since, or others got the version that is served."""
        if self._connection.plan is None or now != self._connection.receivers:
            self._connect(now)

    def _resume(self, version: int, replicas: Replicas) -> None:
        """Let the replicas answer with the new version."""
        self._resuming = version, self._connection.call_remaining("resume_weights", version)
        replicas.confirmed(self._connection.connected, version)

    def _await_resumption(self) -> None:
        """Wait until every replica answers again after the last update."""
        if self._resuming is None:
            return
        (version, resuming), self._resuming = self._resuming, None
        try:
            resuming.result()
        except Exception as error:
            raise explained(error, f"not every replica resumed after weight update {version}") from error

    def _finish(self, version: int, sums: Mapping[str, str], checked: bool) -> tuple[float | None, float | None]:
        """Check the effect of an update that is served, if so `checked`, and hand over; as `EffectCheck.compare`."""
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
    """Whether an update that failed may be tried again: replicas were lost, and nobody may have switched to it, as
    they may have once all of its bytes are `staged`."""
    lost = len(receivers.lost)
    return lost == receivers.world_size if staged else lost > 0
