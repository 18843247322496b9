"""All transports: exact bytes, order, bounds, deadlines, aborts. Sender and receivers run in threads here."""

import threading
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef
from transport_weights import DTYPES, MODEL, bytes_of, metadata, random_weights

from enginehouse.engines.weights import WeightSyncError, WeightTransport
from enginehouse.weights.buckets import AHEAD
from enginehouse.weights.checksums import checksum, copy_with_checksum
from enginehouse.weights.transports import shared_memory
from enginehouse.weights.transports.collective import CollectiveTransport
from enginehouse.weights.transports.deadline import Deadline
from enginehouse.weights.transports.ends import address_of
from enginehouse.weights.transports.inproc import InprocTransport
from enginehouse.weights.transports.shared_memory import SharedMemoryTransport
from enginehouse_transports.differences import DifferencesTransport
from enginehouse_transports.point_to_point import PointToPointTransport

TRANSPORTS = [
    InprocTransport, SharedMemoryTransport, CollectiveTransport, PointToPointTransport, DifferencesTransport
]  # fmt: skip
SECONDS = 20.0


class Connection:
    """Both ends of a transport in this process."""

    def __init__(
        self, transport: WeightTransport, weights: dict[str, torch.Tensor], bucket_bytes: int = 1024, receivers=1
    ):
        self.plan = transport.prepare(metadata(weights), receivers, uuid.uuid4().hex, bucket_bytes)
        senders = receivers if isinstance(transport, InprocTransport) else 1
        self.senders = [transport.connect(self.plan, "send", i) for i in range(senders)]
        reached = self.plan.reached(address_of(each, "127.0.0.1") for each in self.senders)
        self.receivers = [transport.connect(reached, "recv", i) for i in range(receivers)]
        self.sender, self.receiver = self.senders[0], self.receivers[0]
        self.threads = ThreadPoolExecutor(receivers + senders)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        for session in self.receivers + self.senders:
            session.close()
        self.threads.shutdown()

    def start_send(self, version, weights, seconds=SECONDS):
        return [self.threads.submit(s.send, version, list(weights.items()), seconds) for s in self.senders]

    def start_receive(self, version, seconds=SECONDS):
        return [self.threads.submit(receive, r, version, seconds) for r in self.receivers]

    def transfer(self, version, weights):
        """What each receiver got, and the checksums of the first sender."""
        sending, receiving = self.start_send(version, weights), self.start_receive(version)
        return [r.result() for r in receiving], sending[0].result()


def receive(session, version, seconds=SECONDS):
    return {name: t.clone() for chunk in session.recv(version, seconds) for name, t in chunk.tensors}


@pytest.fixture(params=TRANSPORTS, ids=["inproc", "shared_memory", "collective", "point_to_point", "differences"])
def transport(request):
    return request.param()


@pytest.mark.slow
@given(
    shapes=st.lists(
        st.tuples(st.lists(st.integers(0, 8), max_size=3).map(tuple), st.sampled_from(DTYPES)), max_size=12
    ),
    bucket_bytes=st.integers(1, 2048),
    receivers=st.integers(1, 3),
    kind=st.sampled_from(TRANSPORTS),
    seed=st.integers(0, 9),
)
@settings(max_examples=60, deadline=None)
def test_every_byte_of_every_dtype_arrives_over_several_updates(shapes, bucket_bytes, receivers, kind, seed):
    weights = random_weights(shapes, seed)
    with Connection(kind(), weights, bucket_bytes, receivers) as connection:
        for version in range(1, 4):
            weights = random_weights(shapes, seed + version)
            arrived, sums = connection.transfer(version, weights)
            assert [bytes_of(a) for a in arrived] == [bytes_of(weights)] * receivers
            assert sums == {name: checksum(tensor) for name, tensor in weights.items()}


def test_tensors_that_are_not_contiguous_or_need_gradients_arrive(transport):
    weights = {"a": torch.randn(6, 4, requires_grad=True).t(), "b": torch.randn(5, requires_grad=True)}
    with Connection(transport, weights) as connection:
        arrived, _ = connection.transfer(1, weights)
    assert all(torch.equal(arrived[0][name], tensor) for name, tensor in weights.items())


def test_a_receiver_may_wait_long_before_the_sender_begins(transport):
    weights = random_weights(MODEL, 0)
    with Connection(transport, weights) as connection:
        receiving = connection.start_receive(1)
        assert not receiving[0].done()
        connection.start_send(1, weights)
        assert bytes_of(receiving[0].result()) == bytes_of(weights)


def test_a_missing_sender_ends_in_an_error_at_the_deadline(transport):
    with (
        Connection(transport, random_weights(MODEL, 0)) as connection,
        pytest.raises(WeightSyncError, match=r"within 0\.1 s"),
    ):
        receive(connection.receiver, 1, 0.1)


def test_a_missing_receiver_ends_in_an_error_that_names_the_replica(transport):
    weights = random_weights(MODEL, 0)
    with (
        Connection(transport, weights) as connection,
        pytest.raises(WeightSyncError, match=r"replica 0.* within 0\.1 s"),
    ):
        connection.sender.send(1, list(weights.items()), 0.1)


def test_a_deadline_that_passed_does_not_spoil_the_next_update(transport):
    weights = random_weights(MODEL, 0)
    with Connection(transport, weights) as connection:
        with pytest.raises(WeightSyncError):
            connection.sender.send(1, list(weights.items()), 0.05)
        arrived, _ = connection.transfer(2, weights)
        assert bytes_of(arrived[0]) == bytes_of(weights)


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_an_abort_fails_both_sides_at_once_and_the_next_update_works(transport, side):
    weights = random_weights(MODEL, 0)
    with Connection(transport, weights) as connection:
        chunks = connection.receiver.recv(1, SECONDS)
        sending = connection.start_send(1, weights)
        next(chunks)  # the update is under way: a bucket was taken, more wait
        getattr(connection, side).abort(1)
        with pytest.raises(WeightSyncError, match="aborted"):
            list(chunks)
        with pytest.raises(WeightSyncError, match="aborted"):
            sending[0].result(5)
        arrived, _ = connection.transfer(2, weights)
        assert bytes_of(arrived[0]) == bytes_of(weights)


def test_an_abort_before_either_side_began_still_fails_that_version(transport):
    weights = random_weights(MODEL, 0)
    with Connection(transport, weights) as connection:
        connection.sender.abort(1)
        with pytest.raises(WeightSyncError, match="aborted"):
            connection.sender.send(1, list(weights.items()), SECONDS)
        with pytest.raises(WeightSyncError, match="aborted"):
            receive(connection.receiver, 1)
        arrived, _ = connection.transfer(2, weights)
        assert bytes_of(arrived[0]) == bytes_of(weights)


def test_a_receiver_that_stops_early_fails_the_sender(transport):
    weights = random_weights(MODEL, 0)
    with Connection(transport, weights) as connection:
        sending = connection.start_send(1, weights)
        chunks = connection.receiver.recv(1, SECONDS)
        next(chunks)
        chunks.close()
        with pytest.raises(WeightSyncError, match="aborted"):
            sending[0].result(5)


def test_a_receiver_of_an_older_version_is_told_that_it_is_stale(transport):
    weights = random_weights(MODEL, 0)
    with Connection(transport, weights) as connection:
        connection.start_send(5, weights)
        assert bytes_of(receive(connection.receiver, 5)) == bytes_of(weights)
        with pytest.raises(WeightSyncError, match="already begun update 5"):
            receive(connection.receiver, 4)


def test_versions_only_grow(transport):
    weights = random_weights(MODEL, 0)
    with Connection(transport, weights) as connection:
        connection.transfer(3, weights)
        with pytest.raises(WeightSyncError, match="update 3 must be newer than the last begun update, 3"):
            connection.sender.send(3, list(weights.items()), SECONDS)


def test_closing_the_sender_fails_a_waiting_receiver(transport):
    with Connection(transport, random_weights(MODEL, 0)) as connection:
        receiving = connection.start_receive(1)[0]
        connection.sender.close()
        with pytest.raises(WeightSyncError, match="closed"):
            receiving.result(5)


def test_a_gathering_engine_holds_at_most_two_buckets(transport):
    """Besides the one that is taken. Parameters that are made when asked for must not pile up."""
    shapes = [((64,), "float32")] * 12
    weights = random_weights(shapes, 0)
    enough = threading.Semaphore(0)
    made = []

    def gather():
        for name, tensor in weights.items():
            gathered = tensor.clone()
            made.append(StorageWeakRef(gathered.untyped_storage()))
            enough.release()
            yield name, gathered

    with Connection(transport, weights, bucket_bytes=256) as connection:
        sending = connection.threads.submit(connection.sender.send, 1, gather(), SECONDS)
        enough.acquire()
        enough.acquire()
        chunks = connection.receiver.recv(1, SECONDS)
        while next(chunks, None):
            assert sum(not storage.expired() for storage in made) <= 3
        assert sending.result(5)
        assert len(made) == 12


def test_a_sender_whose_engine_fails_reports_that_and_fails_the_receiver(transport):
    weights = random_weights(MODEL, 0)

    def broken():
        yield next(iter(weights.items()))
        raise RuntimeError("gather failed")

    with Connection(transport, weights) as connection:
        receiving = connection.start_receive(1)[0]
        with pytest.raises(RuntimeError, match="gather failed"):
            connection.sender.send(1, broken(), SECONDS)
        with pytest.raises(WeightSyncError, match="aborted"):
            receiving.result(5)


def test_a_rank_that_does_not_send_only_exhausts_its_weights(transport):
    weights = random_weights(MODEL, 0)
    with Connection(transport, weights) as connection:
        other = transport.connect(connection.plan, "send", 1)
        source = iter(weights.items())
        assert other.send(1, source, SECONDS) == {}
        assert next(source, None) is None


class Clock:
    """A clock that only a test moves; it stands in for `time` in the module of deadlines."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now


def test_an_update_may_take_longer_than_its_deadline_while_parameters_leave(transport, monkeypatch):
    clock = Clock()
    monkeypatch.setattr("enginehouse.weights.transports.deadline.time", clock)
    weights = random_weights(MODEL, 0)

    def slowly():
        for item in weights.items():
            clock.now += 0.24 * SECONDS  # the sender is up to three parameters ahead
            yield item

    with Connection(transport, weights, bucket_bytes=1) as connection:
        receiving = connection.start_receive(1)
        sums = connection.sender.send(1, slowly(), SECONDS)
        assert bytes_of(receiving[0].result()) == bytes_of(weights)
    assert sums.keys() == weights.keys()
    assert clock.now > 2 * SECONDS


def test_each_parameter_that_leaves_and_each_bucket_that_is_taken_restarts_both_deadlines(transport, monkeypatch):
    restarts: dict[Deadline, int] = {}

    class Counting(Deadline):
        def restart(self):
            restarts[self] = restarts.get(self, -1) + 1  # not counting the start
            super().restart()

    monkeypatch.setattr("enginehouse.weights.transports.ends.Deadline", Counting)
    weights = random_weights(MODEL, 0)
    with Connection(transport, weights, bucket_bytes=1) as connection:
        assert len(connection.plan.buckets) == len(weights)
        connection.transfer(1, weights)
    assert len(restarts) == 2
    assert min(restarts.values()) >= 2 * len(weights)


def test_each_of_many_replicas_gets_a_bucket_while_later_ones_are_not_sent_yet():
    """Else the buckets that arrive meanwhile would restart no replica's deadline."""
    weights = random_weights([((64,), "float32")] * 12, 0)
    taken = [threading.Semaphore(0) for _ in range(4)]

    def gather():
        for number, item in enumerate(weights.items()):
            if number > AHEAD:  # the bucket this many before is written
                assert all(replica.acquire(timeout=SECONDS) for replica in taken)
            yield item

    def take(session, replica):
        for _ in session.recv(1, SECONDS):
            replica.release()

    with Connection(SharedMemoryTransport(), weights, bucket_bytes=256, receivers=4) as connection:
        taking = [connection.threads.submit(take, *pair) for pair in zip(connection.receivers, taken, strict=True)]
        connection.sender.send(1, gather(), SECONDS)
        assert [each.result(SECONDS) for each in taking] == [None] * 4


def test_a_replica_does_not_wait_for_one_that_takes_nothing():
    weights = random_weights([((64,), "float32")] * 5, 0)
    with Connection(SharedMemoryTransport(), weights, bucket_bytes=256, receivers=2) as connection:
        sending = connection.start_send(1, weights)
        for receiver in connection.receivers:
            chunks = list(receiver.recv(1, SECONDS))
            sums = {name: total for chunk in chunks for name, total in chunk.checksums.items()}
            assert sums == {name: checksum(tensor) for name, tensor in weights.items()}
        assert sending[0].result(SECONDS) == sums


def test_shared_memory_writes_parameters_of_a_bucket_at_the_same_time(monkeypatch):
    both = threading.Barrier(2, timeout=SECONDS)

    def write(source, target):
        both.wait()
        return copy_with_checksum(source, target)

    monkeypatch.setattr(shared_memory, "copy_with_checksum", write)
    monkeypatch.setattr(shared_memory, "TASK_BYTES", 16)  # of each parameter
    weights = {"a": torch.ones(4), "b": torch.zeros(4)}
    with Connection(SharedMemoryTransport(), weights) as made:
        (got,), sums = made.transfer(1, weights)
    assert bytes_of(got) == bytes_of(weights)
    assert list(sums.items()) == [(name, checksum(tensor)) for name, tensor in weights.items()]


def test_a_bucket_of_shared_memory_that_is_not_written_whole_is_not_received(monkeypatch):
    def write(source, target):
        if source[0] == 0:
            raise MemoryError("no memory for b")
        return copy_with_checksum(source, target)

    monkeypatch.setattr(shared_memory, "copy_with_checksum", write)
    weights = {"a": torch.ones(4), "b": torch.zeros(4)}
    with Connection(SharedMemoryTransport(), weights) as made:
        sending = made.start_send(1, weights)[0]
        with pytest.raises(WeightSyncError, match="aborted"):
            next(made.receiver.recv(1, SECONDS))
        with pytest.raises(MemoryError):
            sending.result()
