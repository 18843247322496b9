"""What does not arrive fails on both sides, within the deadline, and leaves the next update exact."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import torch

from enginehouse.engines.weights import WeightSyncError, WeightUpdateAborted
from enginehouse_testing.check import EXACT, PROTOCOL, Check
from enginehouse_testing.checks.transport.exactness import judge, unlike
from enginehouse_testing.link import SHORT_SECONDS, Connection, Link, random_weights


def refused(call: Callable[[], Any], kind: type[Exception] = WeightSyncError) -> str:
    """In words, what is wrong with how a call failed: it has to, with an error of a kind."""
    try:
        call()
    except kind:
        return ""
    except TimeoutError:
        return "it had not ended at its deadline"
    except Exception as error:
        return f"it raised {type(error).__name__}, not {kind.__name__}: {error}"
    return "it ended as if nothing were wrong"


def all_refused(link: Link, futures: list[Future[Any]], kind: type[Exception] = WeightSyncError) -> str:
    """The same of all of some calls that were begun."""
    return next(filter(None, (refused(lambda one=one: one.result(link.seconds), kind) for one in futures)), "")  # type: ignore[misc]


def next_is_exact(connection: Connection, version: int) -> str:
    """The update after a failed one."""
    sent = random_weights(version)
    if said := unlike(connection.update(version, sent)[0], sent):
        return f"the update after it: {said}"
    return ""


def _aborts(link: Link) -> str:
    """From either side, after every number of buckets that were taken."""
    weights = random_weights(0)
    with link.connect(weights) as connection:
        version = 0
        for side, taken in itertools.product(("sender", "receiver"), range(len(connection.plan.buckets))):
            version += 1
            where = f"an abort by the {side} after {taken} of {len(connection.plan.buckets)} buckets"
            streams = [one.recv(version, link.seconds) for one in connection.receivers]
            sending = connection.sending(version, weights.items(), link.unhurried)
            for _ in range(taken):
                for stream in streams:
                    next(stream)
            for session in connection.senders if side == "sender" else connection.receivers:
                session.abort(version)
            for stream in streams:
                if said := refused(lambda stream=stream: list(stream), WeightUpdateAborted):  # type: ignore[misc]
                    return f"{where}: receiving: {said}"
            if said := all_refused(link, sending):
                return f"{where}: sending: {said}"
            version += 1
            if said := next_is_exact(connection, version):
                return f"{where}: {said}"
    return ""


def _aborted_before(link: Link) -> str:
    weights = random_weights(0)
    with link.connect(weights) as connection:
        for session in connection.senders:
            session.abort(1)
        said = all_refused(link, connection.sending(1, weights.items()), WeightUpdateAborted)
        said = said or all_refused(link, connection.receiving(1), WeightUpdateAborted)
        return said or next_is_exact(connection, 2)


def _stops_early(link: Link) -> str:
    weights = random_weights(0)
    with link.connect(weights) as connection:
        sending = connection.sending(1, weights.items(), link.unhurried)
        streams = [one.recv(1, link.seconds) for one in connection.receivers]
        for stream in streams:
            next(stream)
        for stream in streams:
            stream.close()  # type: ignore[attr-defined]
        return all_refused(link, sending) or next_is_exact(connection, 2)


def _no_sender(link: Link) -> str:
    with link.connect(random_weights(0)) as connection:
        said = all_refused(link, connection.receiving(1, SHORT_SECONDS))
        return said or next_is_exact(connection, 2)


def _no_receiver(link: Link) -> str:
    weights = random_weights(0)
    with link.connect(weights) as connection:
        said = all_refused(link, connection.sending(1, weights.items(), SHORT_SECONDS))
        return said or next_is_exact(connection, 2)


def _one_receiver_missing(link: Link) -> str:
    if link.receivers == 1 or link.senders > 1:
        return ""  # each has a sender of its own: the controller aborts the others
    weights = random_weights(0)
    with link.connect(weights) as connection:
        streams = [one.recv(1, link.seconds) for one in connection.receivers]
        sending = connection.sending(1, weights.items(), SHORT_SECONDS * 5)
        next(streams[0])
        said = all_refused(link, sending)
        for stream in streams:
            said = said or refused(lambda stream=stream: list(stream))  # type: ignore[misc]
        return said or next_is_exact(connection, 2)


def _versions(link: Link) -> str:
    weights = random_weights(0)
    with link.connect(weights) as connection:
        if said := next_is_exact(connection, 5):
            return said
        for version in (5, 3):
            if said := all_refused(link, connection.sending(version, weights.items(), link.unhurried)):
                return f"sending version {version} after 5: {said}"
        if said := all_refused(link, connection.receiving(4, link.unhurried)):
            return f"receiving version 4 after 5: {said}"
        return next_is_exact(connection, 6)


def _closed(link: Link) -> str:
    for side in ("sender", "receiver"):
        weights = random_weights(0)
        with link.connect(weights) as connection:
            if side == "sender":
                waiting: list[Future[Any]] = list(connection.receiving(1, link.unhurried))
                for session in connection.senders:
                    session.close()
                said = all_refused(link, waiting)
            else:
                for session in connection.receivers:
                    session.close()
                said = all_refused(link, list(connection.receiving(1, link.unhurried)))
        if said:
            return f"closed by the {side}: {said}"
    return ""


def _sender_fails(link: Link) -> str:
    """The trainer's own error comes out of `send`, and its weights are exhausted, since giving them is collective."""
    weights = random_weights(0)
    given = 0

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal given
        for number, item in enumerate(weights.items()):
            given += 1
            yield ("not planned", item[1]) if number == 2 else item

    with link.connect(weights) as connection:
        receiving = connection.receiving(1, link.unhurried)
        others = [connection.senders[index] for index in range(1, len(connection.senders))]
        for other in others:
            other.abort(1)
        said = refused(lambda: connection.senders[0].send(1, broken(), link.seconds))
        said = said or all_refused(link, receiving)
        if not said and given != len(weights):
            said = f"only {given} of {len(weights)} parameters were asked for"
        return said or next_is_exact(connection, 2)


def _idle_rank(link: Link) -> str:
    """A training rank that sends nothing."""
    weights = random_weights(0)
    with link.connect(weights) as connection:
        idle = link.transport().connect(connection.plan, "send", link.senders)
        source = iter(weights.items())
        if idle.send(1, source, link.seconds) != {}:
            return "it returned checksums"
        if next(source, None) is not None:
            return "it did not exhaust its weights"
        idle.close()
        return next_is_exact(connection, 2)


def _check(name: str, claim: str, act: Callable[[Link], str]) -> Check:
    return Check(name=name, capability=PROTOCOL, claim=claim, tolerance=EXACT, acts=(act,), judge=judge)


CHECKS = (
    _check(
        "abort", "An abort by either side, after any bucket, fails both at once, and the next version is exact", _aborts
    ),
    _check("abort_before", "An abort before either side began fails that version and no other", _aborted_before),
    _check("stops_early", "A receiver that stops early fails the sender", _stops_early),
    _check("no_sender", "A sender that does not begin is an error at the receiver's deadline", _no_sender),
    _check("no_receiver", "A receiver that does not come is an error at the sender's deadline", _no_receiver),
    _check(
        "one_missing", "One receiver of several that does not take a bucket fails all of them", _one_receiver_missing
    ),
    _check("versions", "Versions only grow, and a receiver of an older one is told so", _versions),
    _check("closed", "What waits for a connection that was closed fails", _closed),
    _check("sender_fails", "Weights that are not the planned ones fail both sides, and are exhausted", _sender_fails),
    _check("idle_rank", "A training rank that does not send exhausts its weights and returns nothing", _idle_rank),
)
