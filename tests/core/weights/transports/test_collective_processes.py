"""The collective transport between real processes: what is exact, and who notices a death, or a process that stands."""

import os
import signal
import socket
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest
from transport_processes import FOREVER, SECONDS, UPDATES, receive_one_bucket, receive_updates, send_half, started
from transport_weights import MODEL, bytes_of, metadata, random_weights

from enginehouse.engines.weights import WeightSyncError, WeightUpdateAborted
from enginehouse.weights.transports import collective, rendezvous
from enginehouse.weights.transports.collective import CollectiveTransport
from enginehouse.weights.transports.ends import IdleSender, address_of


def plan_of(receivers: int):
    return CollectiveTransport().prepare(metadata(random_weights(MODEL, 0)), receivers, uuid.uuid4().hex, 512)


@contextmanager
def opened(receivers: int):
    """A sender, and the plan its receivers need."""
    plan = plan_of(receivers)
    sender = CollectiveTransport().connect(plan, "send", 0)
    try:
        yield sender, plan.reached([address_of(sender, "localhost")])
    finally:
        sender.close()


@pytest.mark.slow
def test_two_receiving_processes_get_every_byte():
    with (
        opened(receivers=2) as (sender, plan),
        started(receive_updates, plan, 0) as one,
        started(receive_updates, plan, 1) as other,
    ):
        assert [pipe.recv() for _, pipe in (one, other)] == ["connected"] * 2
        for version in range(1, UPDATES + 1):
            weights = random_weights(MODEL, version)
            sender.send(version, weights.items(), SECONDS)
            assert [pipe.recv() for _, pipe in (one, other)] == [bytes_of(weights)] * 2
        for process, _ in (one, other):
            process.join(SECONDS)
            assert process.exitcode == 0


def test_a_receiver_that_is_killed_fails_the_sender_and_the_other_receivers_at_once():
    with (
        opened(receivers=2) as (sender, plan),
        started(receive_one_bucket, plan, 1) as (process, pipe),
        ThreadPoolExecutor(2) as threads,
    ):
        left = CollectiveTransport().connect(plan, "recv", 0)
        receiving = threads.submit(list, left.recv(1, FOREVER))
        sending = threads.submit(sender.send, 1, list(random_weights(MODEL, 1).items()), FOREVER)
        pipe.recv()
        process.kill()
        # Who notices first tells the other: the sender may hear of it from replica 0.
        with pytest.raises(WeightUpdateAborted, match=r"replica 1 is gone|another rank left|was aborted"):
            sending.result(SECONDS)
        with pytest.raises(WeightUpdateAborted):
            receiving.result(SECONDS)
        left.close()


@pytest.mark.slow
def test_a_receiver_that_stands_still_ends_at_the_senders_deadline_with_its_number():
    with (
        opened(receivers=1) as (sender, plan),
        started(receive_one_bucket, plan) as (process, pipe),
        ThreadPoolExecutor(1) as threads,
    ):
        sending = threads.submit(sender.send, 1, list(random_weights(MODEL, 1).items()), 3.0)
        pipe.recv()
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(WeightSyncError, match=r"replica 0 did not take bucket \d of \d within 3 s"):
            sending.result(SECONDS)


def test_a_sender_that_is_killed_in_an_update_fails_the_receiver_at_once():
    plan = plan_of(receivers=1)
    with started(send_half, plan) as (process, pipe):
        receiver = CollectiveTransport().connect(plan.reached([pipe.recv()]), "recv", 0)
        pipe.send("connected")
        with pytest.raises(WeightUpdateAborted, match=r"rank 0 is gone|another rank left"):
            list(receiver.recv(1, FOREVER))
        process.join(SECONDS)
        assert process.exitcode == -signal.SIGKILL
        receiver.close()


def test_a_receiver_finds_no_sender_where_none_is():
    with socket.create_server(("localhost", 0)) as taken:
        port = taken.getsockname()[1]
    for address in (f"localhost:{port}", ""):
        with pytest.raises(WeightSyncError, match=f"replica 0 cannot connect to training rank 0 at '{address}'"):
            CollectiveTransport().connect(plan_of(1).reached([address]), "recv", 0)


def test_only_the_receivers_of_a_session_are_let_in_and_each_once():
    with opened(receivers=2) as (sender, plan):
        for stranger in (replace(plan, session="another"), replace(plan, receivers=3)):
            with pytest.raises(WeightSyncError, match="did not accept rollout replica"):
                CollectiveTransport().connect(stranger, "recv", stranger.receivers - 1)
        receivers = [CollectiveTransport().connect(plan, "recv", 0)]
        with pytest.raises(WeightSyncError, match="with a replica 0 already"):
            CollectiveTransport().connect(plan, "recv", 0)
        receivers.append(CollectiveTransport().connect(plan, "recv", 1))
        weights = random_weights(MODEL, 1)

        def received(receiver):
            return {name: t.clone() for chunk in receiver.recv(1, SECONDS) for name, t in chunk.tensors}

        with ThreadPoolExecutor(2) as threads:
            arriving = [threads.submit(received, receiver) for receiver in receivers]
            sender.send(1, list(weights.items()), SECONDS)
            assert [bytes_of(one.result(SECONDS)) == bytes_of(weights) for one in arriving] == [True, True]
        with pytest.raises(WeightSyncError, match="cannot connect"):  # all are there: nobody else is listened to
            CollectiveTransport().connect(plan, "recv", 1)
        for receiver in receivers:
            receiver.close()


def test_a_stranger_who_speaks_slowly_is_not_listened_to_for_longer(monkeypatch):
    monkeypatch.setattr(rendezvous, "GREETING_SECONDS", 0.5)
    with (
        opened(receivers=1) as (_, plan),
        socket.create_connection(("localhost", int(plan.address(0)[10:]))) as stranger,
    ):
        stranger.settimeout(0.05)
        answer, spoken = None, 0
        while answer is None and spoken < SECONDS / 0.05:
            stranger.sendall(b" ")
            spoken += 1
            with suppress(TimeoutError):
                answer = stranger.recv(1)
        assert answer == b"", "hung up on, though it goes on speaking"


def test_a_bucket_of_another_version_is_refused(monkeypatch):
    right = collective.write_heading
    monkeypatch.setattr(collective, "write_heading", lambda buffer, version, bucket: right(buffer, version - 1, bucket))
    with opened(receivers=1) as (sender, plan), ThreadPoolExecutor(1) as threads:
        receiver = CollectiveTransport().connect(plan, "recv", 0)
        sending = threads.submit(sender.send, 7, list(random_weights(MODEL, 1).items()), SECONDS)
        with pytest.raises(WeightSyncError, match="expected bucket 1, found bucket 1 of version 6") as caught:
            list(receiver.recv(7, SECONDS))
        assert caught.value.parameters[0] == "p0"
        with pytest.raises(WeightUpdateAborted):
            sending.result(SECONDS)
        receiver.close()


def test_a_replica_that_never_connected_is_named_at_the_deadline():
    with (
        opened(receivers=2) as (sender, _),
        pytest.raises(WeightSyncError, match=r"replica 0, 1 did not connect within 0\.1 s"),
    ):
        sender.send(1, random_weights(MODEL, 1).items(), 0.1)


def test_ranks_but_the_first_send_nothing():
    assert isinstance(CollectiveTransport().connect(plan_of(1), "send", 1), IdleSender)
