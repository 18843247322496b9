"""Parts of parameters from several training ranks to several replicas: real processes, each with its own sockets."""

import os
import signal
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from transport_processes import (
    FOREVER,
    SECONDS,
    UPDATES,
    Source,
    assert_sums_agree,
    part,
    receive_one_bucket,
    running,
    stages,
    started,
    updated,
    wholes,
)
from transport_weights import MODEL, bytes_of, metadata, random_weights

from enginehouse.engines.weights import ParamMeta, WeightSyncError, WeightUpdateAborted
from enginehouse.weights.transports.ends import address_of, weights_for
from enginehouse_transports import point_to_point, streams
from enginehouse_transports.differences import DifferencesTransport
from enginehouse_transports.point_to_point import PointToPointTransport, plan_moves


@pytest.fixture(params=[PointToPointTransport, DifferencesTransport], ids=["point_to_point", "differences"])
def transport(request):
    return request.param()


def planned(parameters, receivers, senders, targets=(), transport=None):
    transport = transport or PointToPointTransport()
    return transport.prepare(parameters, receivers, uuid.uuid4().hex, 512, senders, targets)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(2, 2, 1), (2, 1, 2)], ids=["tp2 x pp2", "tp2 x dp2"])
def test_parts_of_four_ranks_arrive_whole_at_two_replicas_bit_for_bit(layout, transport):
    parameters = stages(*layout)
    with running(planned(parameters, 2, 4, transport=transport)) as (ranks, replicas):
        for version in range(1, UPDATES + 1):
            arrived, sent = updated(ranks, replicas, version)
            assert [found for found, _ in arrived] == [bytes_of(wholes(version))] * 2
            assert all(sent), "every rank takes part"
            assert_sums_agree(arrived, sent)


def test_replicas_that_split_weights_otherwise_get_their_own_parts(transport):
    parameters = stages()
    splits = ("S1", "S0", "S0", "R", "S1", "S0", "S1", "S0")
    targets = [
        replace(meta, owners=(0, 1, 2), mesh_shape=(3,), placements=(split,)) for meta, split in zip(parameters, splits)
    ]
    plan = planned(parameters, 3, 4, targets, transport)
    with running(plan) as (ranks, replicas):
        for version in range(1, UPDATES + 1):
            arrived, sent = updated(ranks, replicas, version)
            weights = wholes(version)
            for index, (found, _) in enumerate(arrived):
                assert found == bytes_of({meta.name: part(weights[meta.name], meta, index) for meta in targets})
            assert_sums_agree(arrived, sent)
    plan = planned(parameters, 3, 4, targets)
    assert plan.bytes_minimum < 3 * sum(meta.nbytes for meta in parameters) / 2


def test_a_plan_says_what_goes_over_the_wire_to_the_byte(monkeypatch):
    read = []
    filled = streams.PartReceiver._fill

    def counting(self, room):
        read.append(len(room))
        return filled(self, room)

    monkeypatch.setattr(streams.PartReceiver, "_fill", counting)
    large = [ParamMeta(f"p{n}", "float32", (64, 64), (0, 1), (2,), ("S0",)) for n in range(4)]
    plan = planned(large, 2, 2)
    transport = PointToPointTransport()
    senders = [transport.connect(plan, "send", rank) for rank in range(2)]
    reached = plan.reached([address_of(sender, "localhost") for sender in senders])
    receivers = [transport.connect(reached, "recv", index) for index in range(2)]
    with ThreadPoolExecutor(4) as threads:
        half = [(meta.name, torch.ones(32, 64)) for meta in large]
        ending = [threads.submit(sender.send, 1, iter(half), SECONDS) for sender in senders]
        ending += [threads.submit(lambda one=one: [None for _ in one.recv(1, SECONDS)]) for one in receivers]
        for one in ending:
            one.result(SECONDS)
    waiting = streams.HEADING_BYTES * 4  # each receiver waits for its next heading
    for session in [*senders, *receivers]:
        session.close()
    assert sum(read) - waiting == plan.bytes_moved
    assert plan.bytes_minimum == 2 * 4 * 64 * 64 * 4
    assert plan.bytes_moved <= 1.05 * plan.bytes_minimum


def test_a_bucket_is_laid_out_once_however_many_parts_come(monkeypatch):
    laid_out = []
    views = point_to_point.view_parameters

    def counting(parts, offsets, memory):
        laid_out.append(len(parts))
        return views(parts, offsets, memory)

    monkeypatch.setattr(point_to_point, "view_parameters", counting)
    plan = planned([ParamMeta(f"p{n}", "float32", (4,)) for n in range(24)], 1, 1)
    assert 1 < len(plan.buckets) < 24
    transport = PointToPointTransport()
    sender = transport.connect(plan, "send", 0)
    receiver = transport.connect(plan.reached([address_of(sender, "localhost")]), "recv", 0)
    with ThreadPoolExecutor(1) as threads:
        for version in range(1, UPDATES + 1):
            weights = ((f"p{n}", torch.full((4,), float(n))) for n in range(24))
            sending = threads.submit(sender.send, version, weights, SECONDS)
            assert sum(len(chunk.tensors) for chunk in receiver.recv(version, SECONDS)) == 24
            sending.result(SECONDS)
    for session in (sender, receiver):
        session.close()
    assert laid_out == [len(bucket) for bucket in plan.buckets]


def test_a_rank_that_is_killed_fails_the_replicas_by_its_number_and_the_other_ranks(transport):
    with running(planned(stages(), 2, 4, transport=transport)) as (ranks, replicas):
        updated(ranks, replicas, 1)
        gone, _ = ranks.pop(2)
        for _, other in [*ranks, *replicas]:
            other.send(2)
        gone.kill()
        said = [other.recv() for _, other in [*replicas, *ranks]]
        assert all(isinstance(one, WeightUpdateAborted) for one in said)
        assert any("training rank 2 is gone" in str(one) for one in said[:2])


def failing(plan, rank, version):
    """A rank's weights, which it cannot give all of."""
    for number, given in enumerate(Source(plan, rank, version).iter_local()):
        if number == 2:
            raise MemoryError("no room on this rank alone")
        yield given


def test_a_rank_that_fails_alone_ends_the_update_of_the_others_at_once(transport):
    plan = planned(stages(), 1, 4, transport=transport)
    connect = transport.connect
    ranks = [connect(plan, "send", rank) for rank in range(4)]
    receiver = connect(plan.reached([address_of(session, "localhost") for session in ranks]), "recv", 0)

    def send(rank):
        weights = failing(plan, rank, 1) if rank == 0 else weights_for(ranks[rank], Source(plan, rank, 1))
        with pytest.raises(MemoryError if rank == 0 else WeightSyncError):
            ranks[rank].send(1, weights, FOREVER)

    def receive():
        with pytest.raises(WeightSyncError):
            list(receiver.recv(1, FOREVER))

    with ThreadPoolExecutor() as pool:
        sending = [pool.submit(send, rank) for rank in range(4)]
        receiving = pool.submit(receive)
        for ended in [receiving, *sending]:
            ended.result(SECONDS)
    for session in [*ranks, receiver]:
        session.close()


def test_a_replica_that_is_killed_fails_the_ranks_by_its_number_and_the_other_replica(transport):
    with running(planned(stages(), 2, 4, transport=transport)) as (ranks, replicas):
        updated(ranks, replicas, 1)
        gone, _ = replicas.pop(1)
        gone.kill()
        gone.join(SECONDS)
        for _, other in [*ranks, *replicas]:
            other.send(2)
        said = [str(other.recv()) for _, other in ranks]
        assert all("replica 1 is gone" in one or "aborted" in one for one in said)
        assert any("replica 1 is gone" in one for one in said)
        assert isinstance(replicas[0][1].recv(), WeightUpdateAborted)


def one_pair(weights, bucket_bytes=512, transport=None):
    """A rank and a replica in this process."""
    transport = transport or PointToPointTransport()
    plan = transport.prepare(metadata(weights), 1, uuid.uuid4().hex, bucket_bytes)
    sender = transport.connect(plan, "send", 0)
    return sender, plan.reached([address_of(sender, "localhost")])


@pytest.mark.slow
def test_a_replica_that_stands_still_with_full_connections_ends_at_the_deadline_with_its_number():
    """Larger than what connections hold: what is written waits for nobody who reads it."""
    weights = {f"p{n}": torch.full((8 << 20,), float(n)) for n in range(4)}
    sender, plan = one_pair(weights, 32 << 20)
    with started(receive_one_bucket, plan) as (process, pipe), ThreadPoolExecutor(1) as threads:
        sending = threads.submit(sender.send, 1, iter(weights.items()), 10.0)
        pipe.recv()
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(WeightSyncError, match=r"replica 0 did not take bucket \d of 4 within 10 s"):
            sending.result(SECONDS)
        sender.close()


def test_what_is_late_of_an_update_that_failed_does_not_reach_the_next(transport):
    """The first update fails with buckets on their way; other weights of the same places come right after it."""
    first, second = random_weights(MODEL, 1), random_weights(MODEL, 2)
    sender, plan = one_pair(first, transport=transport)
    receiver = transport.connect(plan, "recv", 0)
    with ThreadPoolExecutor(1) as threads:
        for version in range(1, 20, 2):
            sending = threads.submit(sender.send, version, iter(first.items()), SECONDS)
            chunks = receiver.recv(version, SECONDS)
            next(chunks)
            receiver.abort(version)
            with pytest.raises(WeightUpdateAborted):
                sending.result(SECONDS)
            sending = threads.submit(sender.send, version + 1, iter(second.items()), SECONDS)
            found = {name: t.clone() for chunk in receiver.recv(version + 1, SECONDS) for name, t in chunk.tensors}
            sending.result(SECONDS)
            assert bytes_of(found) == bytes_of(second)
    receiver.close()
    sender.close()


@pytest.mark.parametrize("given", ["too few rows", "not its own"])
def test_parts_that_are_not_what_the_metadata_say_are_refused_by_name(given):
    held = [ParamMeta("a", "float32", (5, 2), (0, 1), (2,), ("S0",)), ParamMeta("b", "float32", (2,), (1,))]
    plan = planned(held, 1, 2)
    sender = PointToPointTransport().connect(plan, "send", 0)
    other = PointToPointTransport().connect(plan, "send", 1)
    reached = plan.reached([address_of(one, "localhost") for one in (sender, other)])
    receiver = PointToPointTransport().connect(reached, "recv", 0)
    weights = {"too few rows": [("a", torch.zeros(2, 2))], "not its own": [("a", torch.zeros(3, 2)), ("b", None)]}
    with pytest.raises(WeightSyncError, match="the training engine gave") as caught:
        sender.send(1, iter(weights[given]), SECONDS)
    assert caught.value.parameters == (("a",) if given == "too few rows" else ("b",))
    for session in (receiver, sender, other):
        session.close()


def test_metadata_that_contradict_themselves_are_refused_when_the_transfer_is_planned():
    with pytest.raises(WeightSyncError, match="'a' contradict themselves"):
        planned([ParamMeta("a", "float32", (5, 2), (0, 7), (2,), ("S0",))], 1, 2)


def test_a_stream_that_says_what_was_not_planned_ends_the_connection():
    weights = random_weights(MODEL, 1)
    sender, plan = one_pair(weights)
    receiver = PointToPointTransport().connect(plan, "recv", 0)
    sender._moves = [(index, [(99, move) for _, move in moves]) for index, moves in sender._moves]
    with ThreadPoolExecutor(1) as threads:
        sending = threads.submit(sender.send, 1, iter(weights.items()), SECONDS)
        with pytest.raises(WeightUpdateAborted, match="rank 0 is gone, or closed the connection"):
            list(receiver.recv(1, SECONDS))
        with pytest.raises(WeightUpdateAborted):
            sending.result(SECONDS)
    receiver.close()
    sender.close()


def test_a_replica_connects_only_to_ranks_that_send_to_it():
    """Two ranks hold the same one parameter and serve a replica each."""
    plan = planned([ParamMeta("a", "float32", (5, 2), (0, 1))], 2, 2)
    assert [(move.source, move.target) for rank in range(2) for move in plan_moves(plan).moves_to(rank).values()] == [
        (0, 0),
        (1, 1),
    ]
    transport = PointToPointTransport()
    senders = [transport.connect(plan, "send", rank) for rank in range(2)]
    reached = plan.reached([address_of(senders[0], "localhost"), "localhost:1"])
    transport.connect(reached, "recv", 0).close()
    with pytest.raises(WeightSyncError, match="replica 1 cannot connect to training rank 1 at 'localhost:1'"):
        transport.connect(reached, "recv", 1)
    for sender in senders:
        sender.close()
