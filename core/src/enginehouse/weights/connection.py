"""Connects a trainer with replicas, and runs the stages of a weight update over the connection, each verified.

`enginehouse.weights.sync` decides what happens after a failed stage.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from enginehouse.controller.errors import (
    ControllerError,
    GroupClosed,
    RemoteError,
    WorkerDied,
    WorkerError,
    WorkerTimeout,
)
from enginehouse.controller.future import StillRunning, iterate_ended
from enginehouse.controller.members import Gathered, GroupRanks, Members
from enginehouse.engines.weights import LOOPBACK, TransferPlan, WeightSyncError, WeightUpdateAborted
from enginehouse.weights.checksums import compare_checksums, verify_state
from enginehouse.weights.transports.lookup import load_transport

if TYPE_CHECKING:
    from enginehouse.controller.future import Future
    from enginehouse.engines.rollout import PauseMode
    from enginehouse.weights.receiver import Switched

log = logging.getLogger(__name__)

MOST_GRACE_SECONDS, LEAST_GRACE_SECONDS = 15.0, 1.0
"""Upper and lower limit, in seconds, of the grace, which is a quarter of the workers' time limit. The controller waits
this much longer than the workers, because the workers' errors say more than a timeout of the controller. Workers also
have this time to report an abort."""


class WeightConnection:
    """The connection between a trainer and replicas: both sides of a weight transport, and the calls to both sides.

    Args:
        bucket_bytes: maximum number of bytes to send at once, except for larger parameters.
        timeout: time limit of each stage of an update, in seconds. For the transfer it is the longest time in which no
            parameter leaves or arrives.

    Attributes:
        receivers: replicas of the current or the last connection.
        nbytes: size of the weights in bytes, each parameter counted once.
        bytes_moved: bytes that the last update sent to all replicas, if known.
        in_flight: calls of the current transfer, to the trainer and to the replicas.
        generating: True if all replicas generated during the last transfer.
        interrupted_tokens: sum of the replicas' `Switched.interrupted_tokens` at the last switch.
        grace: number of seconds by which the controller waits longer than the workers.
    """

    def __init__(
        self,
        train: GroupRanks,
        transport: str,
        bucket_bytes: int,
        timeout: float,
        lends: bool = False,
        sums_in_place: bool = False,
        adapter: bool = False,
    ):
        self.train, self.timeout = train, timeout
        self.grace = min(MOST_GRACE_SECONDS, max(LEAST_GRACE_SECONDS, timeout / 4))
        self._transport, self._bucket_bytes, self._lends = transport, bucket_bytes, lends
        self._sums_in_place, self._adapter = sums_in_place, adapter
        self.receivers: Members | None = None
        self.plan: TransferPlan | None = None
        self.nbytes = 0
        self.bytes_moved: int | None = None
        self.in_flight: tuple[Future | Gathered, ...] = ()
        self.generating = False
        self.interrupted_tokens: int | None = None

    def open(self, receivers: Members, transport: str = "") -> None:
        """Plan the transfer and open both sides.

        Args:
            transport: a transport to use instead of the connection's own.

        Raises:
            WeightSyncError: the two sides cannot reach each other by this transport.
        """
        self.receivers = receivers
        transport = transport or self._transport
        asked = (True,) if self._adapter else ()
        parameters = self.call_later(self.train, "weight_metadata", *asked).result()
        carrier = load_transport(transport)
        plan = carrier.prepare(
            parameters, receivers.world_size, uuid.uuid4().hex, self._bucket_bytes, self.train.world_size
        )
        one_host = len({*self.train.nodes, *receivers.nodes}) == 1
        self.plan = plan = replace(
            plan,
            transport=transport,
            host=LOOPBACK if one_host else "",
            lends=self._lends,
            sums_in_place=self._sums_in_place and getattr(carrier, "passes_references", False),
            adapter=self._adapter,
        )
        self.nbytes = sum(parameter.nbytes for parameter in parameters)
        try:
            plan = plan.reached(self.call_later(self.train, "connect_weights", plan).result())
            receivers.call_placed("connect_weights", plan, timeout=self.timeout + self.grace).result()
        except Exception as error:
            self.close()
            raise explain(error, f"weight transport {transport!r} could not be connected") from error

    def close(self) -> None:
        """Close both sides, if they can be reached."""
        self.plan = None
        for group in (self.receivers, self.train):
            if group is None:
                continue
            with suppress(ControllerError):
                self.call_later(group, "close_weights", timeout=self.grace).result()

    def begin_transfer(self, version: int, pause: PauseMode) -> None:
        """Start to receive on the replicas, and to send on the trainer. A replica that must be paused handles its
        running requests as `pause` says."""
        receiving = self.call_later(self.connected, "receive_weights", version, self.timeout, pause, patient=True)
        self.in_flight = (receiving,)
        sending = self.call_later(self.train, "send_weights", version, self.timeout, patient=True)
        self.in_flight = (sending, receiving)

    def await_transfer(self) -> Mapping[str, str]:
        """Wait for the transfer, compare checksums, and return the checksum of each parameter."""
        sending, receiving = self.in_flight
        arrived = await_both(receiving, sending)
        sent: dict[str, str] = {}
        for rank, sums in enumerate(sending.result()):
            again = {name: sent[name] for name in sums if name in sent}
            whose = f"training rank {rank}, whose weights differ from those of a training rank with a lower number,"
            compare_checksums(again, {name: sums[name] for name in again}, whose)
            sent |= sums
        for place, sums in enumerate(arrived):
            name = self.connected.name_of(place)
            compare_checksums(sent, sums.sent, name)
            compare_checksums(arrived[0].parameters, sums.parameters, f"{name}, with assembled parts,")
        self.generating = all(sums.generating for sums in arrived)
        counted = [sums.bytes_arrived for sums in arrived if sums.bytes_arrived is not None]
        planned = None if self.plan is None else self.plan.bytes_moved
        self.bytes_moved = sum(counted) if counted else planned
        return arrived[0].parameters if arrived else sent

    def commit(self, version: int, sent: Mapping[str, str]) -> bool:
        """Switch replicas to the new version and verify it. Return True if every replica can read back all of its
        weights."""
        ends: list[Switched | None] = self.call_remaining("commit_weights", version).result()
        switched = {replica: end for replica, end in enumerate(ends) if end is not None}
        for replica, end in switched.items():
            verify_state(end.state, version, sent, self.connected.name_of(replica))
        tokens = [end.interrupted_tokens for end in switched.values() if end.interrupted_tokens is not None]
        self.interrupted_tokens = sum(tokens) if tokens else None
        return all(end.state.reads_all for end in switched.values())

    def abort(self, version: int) -> WorkerError | None:
        """Make both sides abort `version`. Failures of the abort are logged.

        Returns:
            The first error of a worker that died or did not answer the abort; None if all answered.
        """
        silent: WorkerError | None = None
        outstanding: list[Future | Gathered] = list(self.in_flight)
        for group in (self.train, self.receivers):
            if group is None:
                continue
            try:
                outstanding.append(self.call_later(group, "abort_weights", version, timeout=self.grace))
            except GroupClosed as error:  # the update's error has the cause
                log.info("while weight update %d was aborted: %s", version, error)
            except ControllerError as error:
                log.warning("%s was not told that weight update %d is aborted: %s", group.name, version, error)
        deadline = time.monotonic() + self.grace
        for future in outstanding:
            try:
                future.result(max(0.0, deadline - time.monotonic()))
            except Exception as error:
                log.info("while weight update %d was aborted: %s", version, error)
                if silent is None and isinstance(error, WorkerTimeout | WorkerDied):
                    silent = error
        return silent

    def call_later(
        self, members: Members, method: str, *args: Any, timeout: float | None = None, patient: bool = False
    ) -> Future | Gathered:
        """Call members without waiting. The default `timeout` is the time limit of a stage, plus `grace`; see
        `WorkerGroup.call` for `patient`."""
        seconds = self.timeout + self.grace if timeout is None else timeout
        return members.call(method, *args, timeout=seconds, patient=patient)

    def call_remaining(self, method: str, *args: Any) -> Future | Gathered:
        """Call the receivers without waiting. The result of a lost replica is None."""
        return self.connected.call(method, *args, timeout=self.timeout + self.grace, leave_out_lost=True)

    @property
    def connected(self) -> Members:
        assert self.receivers is not None
        return self.receivers


def await_both(waited: Future | Gathered, other: Future | Gathered) -> Any:
    """Return the result of `waited` once both calls have ended. If either fails, raise the error that caused it."""

    def look(timeout: float | None) -> None:
        for future, counterpart in ((waited, other), (other, waited)):
            try:
                future.result(timeout)
            except StillRunning:
                pass
            except Exception as error:
                raise _root_cause(error, counterpart) from error

    look(0.0)
    for _ in iterate_ended([*waited.calls, *other.calls]):
        look(0.0)
    look(None)
    return waited.result()


def _root_cause(error: Exception, other: Future | Gathered) -> Exception:
    """Return `error`, unless it only reports an abort and `other` has the cause."""
    if not isinstance(getattr(error, "cause", error), WeightUpdateAborted):
        return error
    try:
        other.result(MOST_GRACE_SECONDS)
    except StillRunning:
        pass
    except Exception as cause:
        return cause
    return error


def explain(error: Exception, what: str) -> WeightSyncError:
    """Return a `WeightSyncError` with the text and parameters of the error's cause."""
    cause = error.cause if isinstance(error, RemoteError) and error.cause is not None else error
    if isinstance(error, WeightSyncError):
        return error
    text = str(cause) if isinstance(cause, WeightSyncError) else str(error)
    where = f" at {error.role} rank {error.rank} on {error.node}" if isinstance(error, WorkerError) else ""
    return WeightSyncError(f"{what}{where}: {text}", getattr(cause, "parameters", ()))
