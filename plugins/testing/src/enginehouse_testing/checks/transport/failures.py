"""Checks that a failed update fails on both sides, within the deadline, and that the next update is exact."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import torch

from enginehouse.engines.weights import WeightSyncError, WeightUpdateAborted
from enginehouse_testing.check import Checks
from enginehouse_testing.checks.transport.exactness import compare
from enginehouse_testing.link import SHORT_SECONDS, Link, OpenLink, random_weights

CHECKS = Checks()


def check_error(call: Callable[[], Any], kind: type[Exception] = WeightSyncError) -> str:
    """Describe why a call does not raise an error of the expected kind; empty if it does."""
    try:
        call()
    except kind:
        return ""
    except TimeoutError:
        return "it had not ended at the deadline"
    except Exception as error:
        return f"it raised {type(error).__name__}, not {kind.__name__}: {error}"
    return "it ended without an error"


def check_errors(link: Link, futures: list[Future[Any]], kind: type[Exception] = WeightSyncError) -> str:
    """Describe the first call behind `futures` that does not raise an error of the expected kind; empty if all do."""
    mistakes = (check_error(lambda future=future: future.result(link.seconds), kind) for future in futures)  # type: ignore[misc]
    return next(filter(None, mistakes), "")


def check_next(connection: OpenLink, version: int) -> str:
    """Describe how the update after a failed update differs from the weights that were sent."""
    sent = random_weights(version)
    difference = compare(connection.update(version, sent)[0], sent)
    return difference and f"the update after it: {difference}"


@CHECKS.act()
def _abort(link: Link) -> str:
    """An abort by either side, after any bucket, fails both sides at once, and the next version arrives bit for bit."""
    weights = random_weights(0)
    with link.connect(weights) as connection:
        version = 0
        for side, taken in itertools.product(("sender", "receiver"), range(len(connection.plan.buckets))):
            version += 1
            where = f"an abort by the {side} after {taken} of {len(connection.plan.buckets)} buckets"
            streams = [receiver.recv(version, link.seconds) for receiver in connection.receivers]
            sending = connection.send(version, weights.items(), link.unhurried)
            for _ in range(taken):
                for stream in streams:
                    next(stream)
            for session in connection.senders if side == "sender" else connection.receivers:
                session.abort(version)
            for stream in streams:
                if mistake := check_error(lambda stream=stream: list(stream), WeightUpdateAborted):  # type: ignore[misc]
                    return f"{where}: receiving: {mistake}"
            if mistake := check_errors(link, sending):
                return f"{where}: sending: {mistake}"
            version += 1
            if mistake := check_next(connection, version):
                return f"{where}: {mistake}"
    return ""


@CHECKS.act()
def _abort_before(link: Link) -> str:
    """An abort before either side began makes both sides fail for that version, but not for the next."""
    weights = random_weights(0)
    with link.connect(weights) as connection:
        for session in connection.senders:
            session.abort(1)
        return (
            check_errors(link, connection.send(1, weights.items()), WeightUpdateAborted)
            or check_errors(link, connection.receive(1), WeightUpdateAborted)
            or check_next(connection, 2)
        )


@CHECKS.act()
def _stops_early(link: Link) -> str:
    """If a receiver stops early, the sender raises an error."""
    weights = random_weights(0)
    with link.connect(weights) as connection:
        sending = connection.send(1, weights.items(), link.unhurried)
        streams = [receiver.recv(1, link.seconds) for receiver in connection.receivers]
        for stream in streams:
            next(stream)
        for stream in streams:
            stream.close()  # type: ignore[attr-defined]
        return check_errors(link, sending) or check_next(connection, 2)


@CHECKS.act()
def _no_sender(link: Link) -> str:
    """If no sender begins, the receiver raises an error at its deadline."""
    with link.connect(random_weights(0)) as connection:
        return check_errors(link, connection.receive(1, SHORT_SECONDS)) or check_next(connection, 2)


@CHECKS.act()
def _no_receiver(link: Link) -> str:
    """If no receiver comes, the sender raises an error at its deadline."""
    weights = random_weights(0)
    with link.connect(weights) as connection:
        return check_errors(link, connection.send(1, weights.items(), SHORT_SECONDS)) or check_next(connection, 2)


@CHECKS.act()
def _one_missing(link: Link) -> str:
    """If one of several receivers does not take a bucket, all receivers and the sender fail."""
    if link.receivers == 1 or link.senders > 1:
        return ""  # each receiver has its own sender, and the controller aborts the others
    weights = random_weights(0)
    with link.connect(weights) as connection:
        streams = [receiver.recv(1, link.seconds) for receiver in connection.receivers]
        sending = connection.send(1, weights.items(), SHORT_SECONDS * 5)
        next(streams[0])
        mistake = check_errors(link, sending)
        for stream in streams:
            mistake = mistake or check_error(lambda stream=stream: list(stream))  # type: ignore[misc]
        return mistake or check_next(connection, 2)


@CHECKS.act()
def _versions(link: Link) -> str:
    """Versions only grow, and a receiver of an older version gets an error."""
    weights = random_weights(0)
    with link.connect(weights) as connection:
        if mistake := check_next(connection, 5):
            return mistake
        for version in (5, 3):
            if mistake := check_errors(link, connection.send(version, weights.items(), link.unhurried)):
                return f"sending version {version} after 5: {mistake}"
        if mistake := check_errors(link, connection.receive(4, link.unhurried)):
            return f"receiving version 4 after 5: {mistake}"
        return check_next(connection, 6)


@CHECKS.act()
def _closed(link: Link) -> str:
    """A call fails if either side has closed the connection that the call waits for."""
    for side in ("sender", "receiver"):
        with link.connect(random_weights(0)) as connection:
            waiting = connection.receive(1, link.unhurried) if side == "sender" else []
            for session in connection.senders if side == "sender" else connection.receivers:
                session.close()
            mistake = check_errors(link, list(waiting or connection.receive(1, link.unhurried)))
        if mistake:
            return f"closed by the {side}: {mistake}"
    return ""


@CHECKS.act()
def _sender_fails(link: Link) -> str:
    """If weights differ from the plan, both sides fail, and the sender still takes all weights from the engine."""
    weights = random_weights(0)
    asked = 0

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal asked
        for number, item in enumerate(weights.items()):
            asked += 1
            yield ("not planned", item[1]) if number == 2 else item

    with link.connect(weights) as connection:
        receiving = connection.receive(1, link.unhurried)
        for sender in connection.senders[1:]:
            sender.abort(1)
        mistake = check_error(lambda: connection.senders[0].send(1, broken(), link.seconds))
        mistake = mistake or check_errors(link, receiving)
        if not mistake and asked != len(weights):  # giving weights is collective
            mistake = f"the sender took only {asked} of {len(weights)} parameters from the engine"
        return mistake or check_next(connection, 2)


@CHECKS.act()
def _idle_rank(link: Link) -> str:
    """A training rank that does not send takes all weights from its engine and returns no checksums."""
    weights = random_weights(0)
    with link.connect(weights) as connection:
        idle = link.transport().connect(connection.plan, "send", link.senders)
        source = iter(weights.items())
        if idle.send(1, source, link.seconds) != {}:
            return "it returned checksums"
        if next(source, None) is not None:
            return "it did not take all weights from its engine"
        idle.close()
        return check_next(connection, 2)
