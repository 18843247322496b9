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

import itertools
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from enginehouse.controller.errors import (
    ControllerError,
    GroupClosed,
    RemoteError,
    WorkerDied,
    WorkerError,
    WorkerTimeout,
)
from enginehouse.controller.future import StillRunning, as_they_end
from enginehouse.controller.group import WorkerGroup
from enginehouse.controller.members import Gathered, Member, Members, Ranks
from enginehouse.engines.weights import LOOPBACK, TransferPlan, WeightState, WeightSyncError, WeightUpdateAborted
from enginehouse.errors import first_line
from enginehouse.weights.checksums import compare_checksums, verify_state
from enginehouse.weights.effect import (
    WHOLE,
    Scores,
    mean_difference,
    scored_tokens,
    share_shown,
    share_taken,
    stands_still,
)
from enginehouse.weights.transports.lookup import load_transport

if TYPE_CHECKING:
    from enginehouse.controller.future import Future
    from enginehouse.engines.rollout import PauseMode

log = logging.getLogger(__name__)

MOST_GRACE_SECONDS, LEAST_GRACE_SECONDS = 15.0, 1.0
"""How much longer the controller waits than the workers do, a quarter of their time within these bounds: their own
errors say more than its time-out. So long they are also given to say that they gave up."""


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
        self._train = Ranks(train)
        self._replicas = rollout
        self._receivers: Members | None = None  # of the connection there is, or was last
        self._served: tuple[int, Mapping[str, str]] | None = None  # version, checksum of each parameter
        self._transport = transport
        self._bucket_bytes = bucket_bytes
        self._timeout = timeout
        self._grace = min(MOST_GRACE_SECONDS, max(LEAST_GRACE_SECONDS, timeout / 4))
        self._every = effect_check_every
        self._tolerance = effect_tolerance
        self._probe = [list(sequence) for sequence in probe or () if len(sequence) > 1]
        self._trainer = threading.RLock()  # held by who uses the trainer
        self._open = False  # between `connect` and `close`
        self._plan: TransferPlan | None = None
        self._nbytes = 0
        self._updates = 0  # since the connection: the first is always checked for its effect
        self._change_seen = False  # since the connection: an update that changes weights was checked for its effect
        # Scores of a replica, or the first of a role, and by which checksums: when it last took weights, and the last.
        self._agreed: dict[Member | str, tuple[Scores, Mapping[str, str]]] = {}
        self._scored: dict[Member, tuple[Scores, Mapping[str, str]]] = {}
        self._least_taken: dict[Member, float] = {}  # the least share of a change that each has shown
        self._tried = 0  # newest version tried
        self._in_flight: tuple[Future | Gathered, ...] = ()  # a transfer: what sends, and what receives
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
        self._receivers = receivers
        transport = transport or self._transport
        parameters = self._call(self._train, "weight_metadata")
        plan = load_transport(transport).prepare(
            parameters, receivers.world_size, uuid.uuid4().hex, self._bucket_bytes, self._train.world_size
        )
        one_host = len({*self._train.nodes, *receivers.nodes}) == 1
        self._plan = plan = replace(plan, transport=transport, host=LOOPBACK if one_host else "")
        self._nbytes = sum(parameter.nbytes for parameter in parameters)
        self._updates = 0
        self._change_seen = False
        try:
            plan = plan.reached(self._call(self._train, "connect_weights", plan))
            receivers.call_placed("connect_weights", plan, timeout=self._timeout + self._grace).result()
        except Exception as error:
            self._disconnect()
            raise _explained(error, f"weight transport {transport!r} could not be connected") from error

    def begin(self, version: int) -> None:
        """Begin an update behind the call that the trainer is busy with: it sends once it has ended that, and replicas
        pause now. `sync` goes on from there, or `give_up` ends it; meanwhile the trainer takes no other call in.

        To be called where nothing is drawn, and the trainer is busy for much less than the time of a stage. Nothing is
        begun where `sync` has something else to do first.

        Args:
            version: as of `sync`.
        """
        resumed = self._resuming is None or self._resuming[1].done()
        if self._plan is None or self.make_room is not None or version <= self._tried or not resumed:
            return
        if self._has_all_receivers():
            self._begun = _Begun(version, time.monotonic())
            try:
                self._begin_transfer(version, "wait")
            except ControllerError as error:  # what comes of the trainer's call says more
                log.info("weight update %d was not begun: %s", version, error)
                self.give_up()

    def give_up(self) -> None:
        """End the update that was begun, if there is one, without waiting for the trainer."""
        if (begun := self._begun) is not None:
            self._in_flight = ()
            self._abandon(begun)

    def _abandon(self, begun: _Begun) -> None:
        """Give up an update, so that its version may come again."""
        self._begun = None
        self._abort(begun.version)
        self._plan = None  # a connection takes no version that was given up

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
            self._in_flight = self._in_flight if begun else ()
            started, staged = begun.at if begun else time.monotonic(), False
            receivers = self._connected if begun else self._members_now(f"weight update {version} failed")
            try:
                if begun is None:
                    self._follow_membership(receivers)
                    self._begin_transfer(version, pause)
                begun = None
                sent = self._transferred()
                staged = True
                blind = self._commit(version, sent)
                changed = self._served is not None and sent != self._served[1]
                effect, taken = self._finish(version, sent, self._effect_is_due(changed, blind))
                self._resume(version, self._replicas)
                break
            except BaseException as error:
                late = time.monotonic() - started >= self._timeout
                silent = self._abort(version)
                if not isinstance(error, Exception):
                    raise
                if not self._may_begin_anew(receivers, staged):
                    cause = silent if late and silent is not None else error  # who waited for it, says so first
                    raise _explained(cause, f"weight update {version} failed") from error
                log.warning(
                    "weight update %d begins anew, with the replicas there are then: %s", version, first_line(error)
                )
        self._updates += 1
        self._change_seen = self._change_seen or (changed and effect is not None)
        self._served = version, sent
        plan = self._plan
        least = min(self._least_taken.values(), default=None)
        moved = (None, None) if plan is None else (plan.bytes_moved, plan.bytes_minimum)
        return SyncReport(version, time.perf_counter() - called, self._nbytes, effect, taken, *moved, least)

    def catch_up(self, returned: Members) -> None:
        """Make replicas that came back serve the version that the others serve, verified in all three ways.

        Not while the trainer's weights change. If they are not those of that version any more, nothing is served.
        The next `sync` goes to all replicas again.

        Raises:
            WeightSyncError: they do not serve it, and wait for the next update.
        """
        self._send_served(returned, self._transport, bool(self._every), self._replicas, "a returned replica")

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
        with self._trainer:
            self._send_held(members, transport, check, replicas, whom)

    def _send_held(self, members: Members, transport: str, check: bool, replicas: Replicas, whom: str) -> None:
        if self._served is None:
            raise WeightSyncError(f"there is no version to bring to {whom}: no weight update has succeeded")
        self._await_resumption()
        version, sums = self._served
        self._in_flight = ()
        try:
            self._connect(members, transport)
            self._begin_transfer(version, "wait")
            sent = self._transferred()
            compare_checksums(sums, sent, f"the trainer, whose weights are not those of version {version} any more,")
            self._commit(version, sent)
            self._finish(version, sent, check and bool(self._probe))
            self._resume(version, replicas)
            self._await_resumption()
        except BaseException as error:
            self._abort(version)
            if not isinstance(error, Exception):
                raise
            raise _explained(error, f"weight version {version} could not be brought to {whom}") from error

    def close(self) -> None:
        """Close both ends, as far as they still can be reached. What goes wrong is logged: there is nothing to lose."""
        try:
            self._await_resumption()
        except WeightSyncError as error:
            receivers = self._receivers
            all_lost = receivers is not None and len(receivers.lost) == receivers.world_size
            log.log(logging.INFO if all_lost else logging.WARNING, "%s", error)  # a death is told elsewhere
        self._open = False
        self._disconnect()

    def _disconnect(self) -> None:
        self._plan = None
        for group in (self._receivers, self._train):
            if group is None:  # never connected
                continue
            with suppress(ControllerError):
                self._call(group, "close_weights", timeout=self._grace)

    def _members_now(self, what: str) -> Members:
        """Who takes weights now.

        Raises:
            WeightSyncError: nobody does, or will; it begins with `what`.
        """
        try:
            return self._replicas.members()
        except ControllerError as error:
            raise _explained(error, what) from error

    def _has_all_receivers(self) -> bool:
        """Whether those that take weights now are those of the connection."""
        try:
            return self._replicas.members() == self._receivers
        except ControllerError:
            return False

    def _follow_membership(self, now: Members) -> None:
        """Connect anew where replicas were lost or came back since, or others got the version that is served."""
        if self._plan is None or now != self._receivers:
            self._connect(now)

    @staticmethod
    def _may_begin_anew(receivers: Members, staged: bool) -> bool:
        """Whether an update that failed may be tried again: replicas were lost, and nobody may have switched to it.

        Args:
            receivers: who was to get it.
            staged: whether they had all of its bytes.
        """
        lost = len(receivers.lost)
        return lost == receivers.world_size if staged else lost > 0

    # The stages

    def _begin_transfer(self, version: int, pause: PauseMode) -> None:
        """Have replicas pause and receive, and the trainer send."""
        receiving = self._call_later(self._connected, "receive_weights", version, self._timeout, pause)
        self._in_flight = (receiving,)
        self._in_flight = (self._call_later(self._train, "send_weights", version, self._timeout), receiving)

    def _transferred(self) -> Mapping[str, str]:
        """Wait for a transfer, and compare bytes; returns each parameter's checksum as it left and arrived."""
        sending, receiving = self._in_flight
        arrived = _await_both(receiving, sending)
        sent: dict[str, str] = {}
        for rank, sums in enumerate(sending.result()):
            again = {name: sent[name] for name in sums if name in sent}
            whose = f"another training rank, {rank}, which holds other weights than one before it"
            compare_checksums(again, {name: sums[name] for name in again}, whose)
            sent |= sums
        for replica, found in enumerate(arrived):
            compare_checksums(sent, found.sent, self._name(replica))
            compare_checksums(arrived[0].parameters, found.parameters, f"{self._name(replica)}, put together,")
        return arrived[0].parameters if arrived else sent

    def _commit(self, version: int, sent: Mapping[str, str]) -> bool:
        """Switch to the new version, as the replicas say it is; returns whether one of them cannot be read back."""
        states: list[WeightState | None] = self._call_remaining("commit_weights", version).result()
        for replica, state in enumerate(states):
            if state is not None:
                verify_state(state, version, sent, self._name(replica))
        return any(state is not None and not state.checksums for state in states)

    def _effect_is_due(self, changed: bool, blind: bool) -> bool:
        """Whether this update's effect is to be checked.

        Args:
            changed: whether it brings other weights than those that are served.
            blind: whether a replica cannot be read back.
        """
        if not (self._every and self._probe):
            return False
        return self._updates % self._every == 0 or (changed and (blind or not self._change_seen))

    def _resume(self, version: int, replicas: Replicas) -> None:
        """Let the replicas answer with the new version."""
        self._resuming = version, self._call_remaining("resume_weights", version)
        replicas.confirmed(self._connected, version)

    def _call_remaining(self, method: str, *args: Any) -> Future | Gathered:
        """Call the receivers; None is the result of a replica that was lost."""
        return self._connected.call(method, *args, timeout=self._timeout + self._grace, leave_out_lost=True)

    def _await_resumption(self) -> None:
        """Wait until every replica answers again after the last update."""
        if self._resuming is None:
            return
        (version, resuming), self._resuming = self._resuming, None
        try:
            resuming.result()
        except Exception as error:
            raise _explained(error, f"not every replica resumed after weight update {version}") from error

    def _finish(self, version: int, sums: Mapping[str, str], checked: bool) -> tuple[float | None, float | None]:
        """What comes of an update once it is served: the check of its effect, where there is one, and the handing over.

        Returns:
            What `_check_effect` does; None for what is not checked.
        """
        from enginehouse.data import Batch, Ragged
        from enginehouse.engines.train import Outputs

        computing: Future | Gathered | None = None
        if checked:
            probe = Batch({"input_ids": Ragged.from_list(self._probe)})
            computing = self._call_later(self._train, "forward", probe, Outputs())
        if self.hand_over is not None:
            if computing is not None:
                computing.result()
            self.hand_over()
        return (None, None) if computing is None else self._check_effect(version, sums, computing)

    def _check_effect(
        self, version: int, sums: Mapping[str, str], computing: Future | Gathered
    ) -> tuple[float, float | None]:
        """Have the replicas score the probe, as the trainer does; returns the largest mean difference of a replica, and
        what the least took."""
        scored = _await_both(self._call_remaining("score", self._probe), computing)
        computed: Any = computing.result()
        column = computed["logprobs"]
        expected = [column[row].tolist() for row in range(len(self._probe))]
        rounding = self._rounding()
        differences, shares = [0.0], []
        for replica, rows in enumerate(scored):
            if rows is None:
                continue
            difference = mean_difference(expected, rows)
            if not difference <= self._tolerance:  # a NaN is not within tolerance
                raise WeightSyncError(
                    f"{self._name(replica)} has the weights of version {version} by their bytes, but computes with "
                    f"something else: its logprobs differ from the trainer's by {difference:.4g} nats on average "
                    f"(weights.effect_tolerance is {self._tolerance:g}). It answers no requests."
                )
            differences.append(difference)
            share = self._share_taken(
                version, replica, Scores(scored_tokens(expected), scored_tokens(rows)), sums, rounding
            )
            if share is not None:
                shares.append(share)
        return max(differences), min(shares, default=None)

    def _share_taken(
        self, version: int, replica: int, now: Scores, sums: Mapping[str, str], rounding: float
    ) -> float | None:
        """How much of what has changed since a replica last took weights it shows; see `share_taken`.

        One that was started again has those of the first update to be compared with: those it was started with. What
        has the checksums `sums` too is not compared: a trainer that is not reproducible moves without a change.
        """
        role, key = self._connected.name, self._connected.members[replica]
        agreed = self._agreed.get(key) or self._agreed.get(role)
        if agreed is None:
            self._agreed[role] = self._agreed[key] = self._scored[key] = now, sums
            return None
        earlier = [scores for scores, by in (self._scored.get(key, agreed), agreed) if by != sums]
        still = [scores for scores in earlier if stands_still(scores, now)]
        before = still[0] if still else agreed[0]
        share = 0.0 if still else share_taken(before, now, rounding) if agreed[1] != sums else None
        if share is not None and share < 0.5:
            moved = float(abs(now.trainer - before.trainer).mean())
            raise WeightSyncError(
                f"{self._name(replica)} says that it serves version {version}, but computes as before: the trainer's "
                f"logprobs of {len(now.trainer)} tokens have changed by {moved:.3g} nats on average, and it shows "
                f"{share:.0%} of that. It dropped the update, or a large part of it, and answers no requests."
            )
        self._scored[key] = now, sums
        if share is not None:
            self._agreed[key] = now, sums
            shown, least = share_shown(before, now, rounding), self._least_taken.get(key, 1.0)
            self._least_taken[key] = min(shown, least)
            if shown < WHOLE <= least:
                log.warning(
                    "%s serves version %d, and shows at most %.0f%% of the change in the trainer's logprobs "
                    "of %d tokens: it may drop a part of each update, as weights that it never fills "
                    "(weights/least_taken)",
                    *(self._name(replica), version, 100 * shown, len(now.trainer)),
                )
        return share

    def _rounding(self) -> float:
        """The epsilon of the coarsest floating-point dtype of the weights."""
        import torch

        dtypes = {getattr(torch, parameter.dtype) for parameter in self._plan.parameters} if self._plan else set()
        return max((torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point), default=0.0)

    def _abort(self, version: int) -> WorkerError | None:
        """Make both sides give up `version`; what cannot be reached is logged.

        Returns:
            The error of a worker that says nothing any more, not even that it gave up; the first there is.
        """
        silent: WorkerError | None = None
        outstanding: list[Future | Gathered] = list(self._in_flight)
        for group in (self._train, self._receivers):
            if group is None:
                continue
            try:
                outstanding.append(self._call_later(group, "abort_weights", version, timeout=self._grace))
            except GroupClosed as error:  # what broke the group is what the update's error says
                log.info("while weight update %d was aborted: %s", version, error)
            except ControllerError as error:
                log.warning("%s was not told that weight update %d is aborted: %s", group.name, version, error)
        deadline = time.monotonic() + self._grace
        for future in outstanding:
            try:
                future.result(max(0.0, deadline - time.monotonic()))
            except Exception as error:
                log.info("while weight update %d was aborted: %s", version, error)
                if silent is None and isinstance(error, WorkerTimeout | WorkerDied):
                    silent = error
        return silent

    # Calls

    def _call_later(self, members: Members, method: str, *args: Any, timeout: float | None = None) -> Future | Gathered:
        return members.call(method, *args, timeout=self._timeout + self._grace if timeout is None else timeout)

    def _call(self, members: Members, method: str, *args: Any, timeout: float | None = None) -> Any:
        return self._call_later(members, method, *args, timeout=timeout).result()

    def _name(self, replica: int) -> str:
        return f"{self._connected.name} replica {self._connected.members[replica].number}"

    @property
    def _connected(self) -> Members:
        assert self._receivers is not None  # there was a connection
        return self._receivers


def _await_both(waited: Future | Gathered, other: Future | Gathered) -> Any:
    """The result of `waited`, once `other` has ended as well; an error of either, the one that caused the other."""
    for _ in itertools.chain([None], as_they_end([*waited.calls, *other.calls])):
        for one, another in ((waited, other), (other, waited)):
            try:
                one.result(0.0)
            except StillRunning:
                pass
            except Exception as error:
                raise _root_cause(error, another) from error
    _await_or_cause(waited, other)
    _await_or_cause(other, waited)
    return waited.result()


def _await_or_cause(future: Future | Gathered, other: Future | Gathered) -> None:
    """Wait for `future`; its error, or that of `other` if it is the cause."""
    try:
        future.result()
    except Exception as error:
        raise _root_cause(error, other) from error


def _root_cause(error: Exception, other: Future | Gathered) -> Exception:
    """`error`, unless it only says that the update was aborted and `other` knows why."""
    if not isinstance(getattr(error, "cause", error), WeightUpdateAborted):
        return error
    try:
        other.result(MOST_GRACE_SECONDS)
    except StillRunning:
        pass
    except Exception as cause:
        return cause
    return error


def _explained(error: Exception, what: str) -> WeightSyncError:
    """A `WeightSyncError` that says all the error's cause says, with its parameters."""
    cause = error.cause if isinstance(error, RemoteError) and error.cause is not None else error
    if isinstance(error, WeightSyncError):
        return error
    text = str(cause) if isinstance(cause, WeightSyncError) else str(error)
    where = f" at {error.role} rank {error.rank} on {error.node}" if isinstance(error, WorkerError) else ""
    return WeightSyncError(f"{what}{where}: {text}", getattr(cause, "parameters", ()))
