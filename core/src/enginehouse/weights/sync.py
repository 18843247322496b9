"""Sends the trainer's weights to rollout replicas by any transport. An update is verified, or it fails.

    send || stage -> compare bytes -> pause -> switch -> compare what is served -> (effect) -> resume

Replicas generate until `pause`, if their engine stages while it generates (`stages_while_generating`). Other engines
are paused before the first byte is sent.

- *Bytes*: the checksum of each parameter before it left is compared with its checksum at arrival, before any replica
  drops the old version. If several ranks send parts of parameters, the parts' checksums are compared, and also the
  checksums of whole parameters between replicas.
- *Version*: each replica then reports its version and checksums. No replica answers a request with the new version
  before all have reported.
- *Effect*: each replica and the trainer compute the logprobs of a few fixed token sequences, because some engines hold
  the right bytes but compute with others. The two results must agree within a tolerance. Their changes since they last
  agreed must agree too (`enginehouse.weights.effect`), because a dropped update changes the logprobs by far less than
  any tolerance. Replicas that report checksums of all parameters are checked at the first update, at the first that
  changes weights, and every few updates. Other replicas are checked at every update that changes weights.

If replicas can be lost separately (`Replicas`), an update leaves out a replica that dies. If the replica had not
received all bytes, the update is sent again to the others. If all die, the first that returns gets the update. A
returned replica gets the served version (`catch_up`) or the next version. Replicas of another engine get the served
version too (`serve_on`).

The called worker methods are those of `enginehouse.roles.workers`. Any worker class with these methods works.
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
from enginehouse.weights.checksums import are_of_one_kind, compare_checksums
from enginehouse.weights.connection import WeightConnection, await_both, explain
from enginehouse.weights.effect_check import EffectCheck, rounding_of

if TYPE_CHECKING:
    from enginehouse.controller.future import Future
    from enginehouse.engines.rollout import PauseMode

log = logging.getLogger(__name__)


class Replicas(Protocol):
    """Rollout replicas that may be lost and return, such as those of `enginehouse.fleet.fleet`."""

    name: str

    def members(self) -> Members:
        """Return the replicas that can receive weights now. Raises `ControllerError` if there are none."""
        ...

    def confirm(self, members: Members, version: int) -> None:
        """Let `members` that are not lost answer with `version`, which they were verified to serve."""
        ...


@dataclass(frozen=True, slots=True)
class SyncReport:
    """A verified update.

    Attributes:
        seconds: time from the first call to the verification of the last replica, without the resumption.
        stopped: time, in seconds, from the pause of the replicas for this update until they were told to resume.
        effect: largest mean absolute difference between the trainer's logprobs and the logprobs of a replica, in nats;
            None if the effect was not checked.
        taken: least fraction of the trainer's change of logprobs that a replica shows, 0.5 to 1; None if it was not
            checked, or the change is still too small to be distinguished from rounding.
        bytes_moved: bytes that the update sent to all replicas, if known.
        bytes_minimum: least number of bytes for the update, if known.
        least_taken: minimum, over all replicas and updates, of the largest fraction of a change that a replica can have
            taken (`share_shown`).
        interrupted_tokens: number of tokens, prompts included, of the completions that were running when their replica
            switched; None if unknown, or the update waited for them.
    """

    version: int
    seconds: float
    stopped: float
    nbytes: int
    effect: float | None
    taken: float | None = None
    bytes_moved: int | None = None
    bytes_minimum: int | None = None
    least_taken: float | None = None
    interrupted_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class _Begun:
    """A transfer that waits for the trainer. It began at the time `at` of `time.monotonic()`."""

    version: int
    at: float


class WeightSync:
    """Sends a training group's weights to rollout replicas.

    Args:
        train: workers with the methods of `TrainWorker`.
        rollout: replicas of workers with the methods of `RolloutWorker`.
        transport: name of a weight transport, or `"module:Class"`.
        bucket_bytes: maximum number of bytes to send at once, except for larger parameters.
        timeout: time limit of each stage of an update, in seconds; for the transfer, without progress.
        effect_tolerance: largest accepted mean absolute difference between the logprobs of a replica and of the
            trainer, in nats.
        lends: True if no replica generates while the trainer trains, so that the trainer may lend its tensors to
            replicas in its processes. Such replicas reject requests during training.
        adapter: True if the replicas' `ModelSpec.adapter` is set, so that updates bring the trainer's adapter alone.
        sums_in_place: True if replicas in the trainer's processes have the capability `device_checksums`, and the
            weights are on a device that computes a `mixed_checksum` faster than it copies weights to the host.

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
        sums_in_place: bool = False,
        adapter: bool = False,
    ):
        self._connection = WeightConnection(
            GroupRanks(train), transport, bucket_bytes, timeout, lends, sums_in_place, adapter
        )
        self._effect = EffectCheck(effect_check_every, effect_tolerance, probe or ())
        self._replicas = rollout
        self._served: tuple[int, Mapping[str, str]] | None = None  # version, checksum of each parameter
        self._timeout = timeout
        self._trainer = threading.RLock()  # held while the trainer is used
        self._open = False  # between `connect` and `close`
        self._tried = 0
        self._begun: _Begun | None = None
        self._resuming: tuple[int, Future | Gathered] | None = None  # of the last update

    def trainer_in_use(self) -> AbstractContextManager[Any]:
        """Return a context in which the caller uses the trainer, so that `catch_up` waits."""
        return self._trainer

    @contextmanager
    def trainer_idle(self) -> Iterator[None]:
        """Let `catch_up` run inside a block of `trainer_in_use`, because the trainer has the served weights."""
        self._trainer.release()
        try:
            yield
        finally:
            self._trainer.acquire()

    def connect(self) -> None:
        """Plan the transfer and open both sides. Call it again after a group was restarted. Raises `WeightSyncError` if
        the two sides cannot reach each other by this transport, or a replica did not resume after the last update."""
        self._await_resumption()
        self._connect(self._replicas.members())
        self._open = True

    def _connect(self, receivers: Members, transport: str = "") -> None:
        self._effect.begin_connection()
        self._connection.open(receivers, transport)

    def begin(self, version: int) -> None:
        """Begin an update while the trainer is busy. The trainer sends after its current call. Replicas that must be
        paused during a transfer are paused now.

        `publish` continues the update, or `give_up` ends it. Until then, call no other method of the trainer. Call
        `begin` only while no replica generates, and only if the trainer's current call takes much less time than a
        stage may take. `begin` does nothing if `publish` must do something else first, such as connect.
        """
        resumed = self._resuming is None or self._resuming[1].done()
        if self._connection.plan is None or self.make_room is not None or version <= self._tried or not resumed:
            return
        if self._has_all_receivers():
            self._begun = _Begun(version, time.monotonic())
            try:
                self._connection.begin_transfer(version, "wait")
            except ControllerError as error:  # the error of the trainer's call says more
                log.info("weight update %d was not begun: %s", version, error)
                self.give_up()

    def give_up(self) -> None:
        """End an update that `begin` began, without waiting for the trainer."""
        if (begun := self._begun) is not None:
            self._connection.in_flight = ()
            self._abandon(begun)

    def _abandon(self, begun: _Begun) -> None:
        """Abort an update, so that its version may be tried again."""
        self._begun = None
        self._connection.abort(begun.version)
        self._connection.plan = None  # a connection rejects a version that was aborted

    def _take_over(self, version: int) -> _Begun | None:
        """Return the update of `begin` if `publish` can continue it; otherwise abort that update and return None. The
        time limit of the transfer is counted from `begin`, so at least half of that time must be left."""
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

        When it returns, every replica was verified and told to answer with the version. If a replica could not resume,
        the next `publish` or `connect` raises the error.

        Args:
            version: larger than all versions tried before.
            pause: treatment of requests in progress.

        Raises:
            WeightSyncError: the update failed; the message names the parameters and the replica. No replica answers a
                request with `version`. Replicas that have not switched continue with their old version. A replica that
                had switched answers no request until a later update succeeds.
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
                staged, changed = True, self._served is not None and sent != self._served[1]
                computing = self._compute_probe() if self._effect.is_due(changed) else None
                stopped_at = time.monotonic() if self._connection.generating else started
                self._effect.reads_all = self._connection.commit(version, sent)
                if computing is None and self._effect.is_due(changed):
                    computing = self._compute_probe()
                effect, taken = self._finish(version, sent, computing)
                self._resume(version, self._replicas)
                stopped = time.monotonic() - stopped_at
                break
            except BaseException as error:
                late = time.monotonic() - started >= self._timeout
                silent = self._connection.abort(version)
                if not isinstance(error, Exception):
                    raise
                if not _may_begin_anew(receivers, staged):
                    cause = silent if late and silent is not None else error  # a late process's error comes first
                    raise explain(cause, f"weight update {version} failed") from error
                log.warning(
                    "weight update %d starts again, with the replicas that live then: %s", version, first_line(error)
                )
        self._effect.note_update(changed, effect is not None)
        self._served = version, sent
        plan, nbytes, least = self._connection.plan, self._connection.nbytes, self._effect.least_taken
        moved = (None, None) if plan is None else (self._connection.bytes_moved, plan.bytes_minimum)
        seconds, interrupted = time.perf_counter() - called, self._connection.interrupted_tokens
        return SyncReport(version, seconds, stopped, nbytes, effect, taken, *moved, least, interrupted)

    def catch_up(self, returned: Members) -> None:
        """Make returned replicas serve the version of the other replicas, with all three verifications.

        Do not call this while the trainer's weights change. If they have changed since that version, the call fails.
        The next `publish` sends to all replicas again.

        Raises:
            WeightSyncError: the replicas do not serve the version, and wait for the next update.
        """
        self._send_served(returned, "", bool(self._effect.every), self._replicas, "a returned replica")

    def serve_on(self, replicas: Replicas, transport: str, check: bool = True) -> None:
        """Make replicas of another engine serve the version that the rollout serves, with all three verifications.

        Do not call this after the trainer's weights have changed, or while they change: if the served version was
        summed in place (`sums_in_place`), that is not noticed. The next `publish` sends to the rollout again.

        Args:
            replicas: replicas of another engine than the rollout's.
            transport: name of the weight transport to them, or `"module:Class"`.
            check: False leaves out the effect check, for an engine that cannot score prompts.

        Raises:
            WeightSyncError: the replicas do not serve the version, or served it already.
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
                if are_of_one_kind(sums, sent):  # not between a transport with `sums_in_place` and another
                    compare_checksums(sums, sent, changed)
                computing = self._compute_probe() if check and self._effect.probe else None
                connection.commit(version, sent)
                self._finish(version, sent, computing)
                self._resume(version, replicas)
                self._await_resumption()
            except BaseException as error:
                connection.abort(version)
                if not isinstance(error, Exception):
                    raise
                raise explain(error, f"weight version {version} could not be brought to {whom}") from error

    def close(self) -> None:
        """Close both sides, if they can be reached, and log errors."""
        try:
            self._await_resumption()
        except WeightSyncError as error:
            log.warning("%s", error)
        self._open = False
        self._connection.close()

    def _members_now(self, what: str) -> Members:
        """Return the replicas that can receive weights; if none, raise a `WeightSyncError` that begins with `what`."""
        try:
            return self._replicas.members()
        except ControllerError as error:
            raise explain(error, what) from error

    def _has_all_receivers(self) -> bool:
        """Return True if the replicas that can receive weights are those of the connection."""
        try:
            return self._replicas.members() == self._connection.receivers
        except ControllerError:
            return False

    def _resume(self, version: int, replicas: Replicas) -> None:
        """Let the replicas answer with the new version."""
        self._resuming = version, self._connection.call_remaining("resume_weights", version)
        replicas.confirm(self._connection.connected, version)

    def _await_resumption(self) -> None:
        """Wait until every replica that lives answers requests again after the last update."""
        if self._resuming is None:
            return
        (version, resuming), self._resuming = self._resuming, None
        try:
            resuming.result()
        except Exception as error:
            failure = explain(error, f"not every replica resumed after weight update {version}")
            receivers = self._connection.connected
            if len(receivers.lost) < receivers.world_size:
                raise failure from error
            log.info("%s", failure)  # a death is reported elsewhere, and who returns gets the weights anew

    def _compute_probe(self) -> Future | Gathered:
        """Begin to compute the trainer's logprobs of the probe. It need not wait for the replicas' switch, so it does
        not lengthen the time in which they stop."""
        from enginehouse.data import Batch, Ragged
        from enginehouse.engines.train import Outputs

        connection = self._connection
        tokens = Batch({"input_ids": Ragged.from_list(self._effect.probe)})
        computing = connection.call_later(connection.train, "forward", tokens, Outputs())
        connection.in_flight = (*connection.in_flight, computing)  # an abort waits for it
        return computing

    def _finish(
        self, version: int, sums: Mapping[str, str], computing: Future | Gathered | None
    ) -> tuple[float | None, float | None]:
        """Call `hand_over` after the trainer's last computation. Then check the effect of the served update with the
        result of `_compute_probe`, and return the result of `EffectCheck.compare`; without one, return None twice."""
        connection, probe = self._connection, self._effect.probe
        if self.hand_over is not None:
            if computing is not None:
                computing.result()
            self.hand_over()
        if computing is None:
            return None, None
        scored = await_both(connection.call_remaining("score", probe), computing)
        computed: Any = computing.result()
        column = computed["logprobs"]
        expected = [column[row].tolist() for row in range(len(probe))]
        rounding = rounding_of(connection.plan.parameters if connection.plan is not None else ())
        return self._effect.compare(version, connection.connected, sums, expected, scored, rounding)


def _may_begin_anew(receivers: Members, staged: bool) -> bool:
    """Return True if a failed update may be tried again, because replicas were lost and no living replica can have
    switched to the new version. A living replica can have switched once all bytes are `staged`."""
    lost = len(receivers.lost)
    return lost == receivers.world_size if staged else lost > 0
