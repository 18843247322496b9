"""Shared memory between real processes: what is exact, what is left over, and who notices a death."""

import os
import signal
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from transport_processes import (
    SECONDS,
    UPDATES,
    Source,
    assert_sums_agree,
    receive_updates,
    running,
    send_half,
    stages,
    started,
    updated,
    wholes,
)
from transport_weights import MODEL, bytes_of, metadata, random_weights

from enginehouse.engines.weights import ParamMeta, WeightSyncError, WeightUpdateAborted
from enginehouse.weights.transports import shared_memory
from enginehouse.weights.transports.control_block import DESCRIPTOR, PROCESS, ControlBlock
from enginehouse.weights.transports.shared_memory import SharedMemoryTransport
from enginehouse.weights.transports.shared_segment import SharedSegment

pytestmark = pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="looks into /dev/shm")


def make_plan(receivers: int):
    return SharedMemoryTransport().prepare(metadata(random_weights(MODEL, 0)), receivers, uuid.uuid4().hex, 512)


def left_over(session: str) -> bool:
    return Path("/dev/shm", SharedSegment.name_of(session)).exists()


def test_two_receiving_processes_get_every_byte_and_nothing_is_left_over(monkeypatch):
    plan = make_plan(receivers=2)
    sender = SharedMemoryTransport().connect(plan, "send", 0)
    with started(receive_updates, plan, 0) as one, started(receive_updates, plan, 1) as other:
        assert [pipe.recv() for _, pipe in (one, other)] == ["connected"] * 2
        for version in range(1, UPDATES + 1):
            monkeypatch.setattr(shared_memory, "TASK_BYTES", (1, 300, 1 << 22)[version % 3])
            weights = random_weights(MODEL, version)
            sender.send(version, weights.items(), SECONDS)
            assert [pipe.recv() for _, pipe in (one, other)] == [bytes_of(weights)] * 2
            assert not left_over(plan.session)  # the name goes as soon as everyone is attached
        for process, _ in (one, other):
            process.join(SECONDS)
            assert process.exitcode == 0
    sender.close()


@pytest.mark.slow
def test_a_sender_killed_in_an_update_ends_in_the_receivers_deadline_and_leaves_nothing():
    plan = make_plan(receivers=1)
    with started(send_half, plan) as (process, pipe):
        assert pipe.recv() == "", "shared memory has no address"
        receiver = SharedMemoryTransport().connect(plan, "recv", 0)
        pipe.send("connected")
        with pytest.raises(WeightSyncError, match=r"bucket \d of \d did not arrive within 3 s"):
            list(receiver.recv(1, 3))
        process.join(SECONDS)
        assert process.exitcode == -signal.SIGKILL
    assert not left_over(plan.session)


@pytest.mark.parametrize("layout", [(2, 2, 1), pytest.param((2, 1, 2), marks=pytest.mark.slow)], ids=["pp", "dp"])
def test_each_rank_writes_parts_of_its_own_and_replicas_get_every_byte(layout):
    plan = SharedMemoryTransport().prepare(stages(*layout), 2, uuid.uuid4().hex, 512, 4)
    with running(plan) as (senders, replicas):
        for version in range(1, UPDATES + 1):
            arrived, sent = updated(senders, replicas, version)
            assert [found for found, _ in arrived] == [bytes_of(wholes(version))] * 2
            assert all(sent), "every rank takes part"
            assert_sums_agree(arrived, sent)
            assert sum(map(len, sent)) == len({name for sums in sent for name in sums}), "no part is written twice"
            assert not left_over(plan.session)


class FourRanks:
    """Both ends of a connection, in threads of this process."""

    def __init__(self):
        self.plan = SharedMemoryTransport().prepare(stages(), 1, uuid.uuid4().hex, 512, 4)
        self.ranks = [SharedMemoryTransport().connect(self.plan, "send", rank) for rank in range(4)]
        self.receiver = SharedMemoryTransport().connect(self.plan, "recv", 0)
        self.threads = ThreadPoolExecutor(4)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for end in [self.receiver, *self.ranks]:
            end.close()
        self.threads.shutdown()

    def send(self, version, sent_by=lambda rank, weights: weights):
        """Begin to send on every rank."""
        weights = [sent_by(rank, Source(self.plan, rank, version).iter_local()) for rank in range(4)]
        return [self.threads.submit(end.send, version, own, SECONDS) for end, own in zip(self.ranks, weights)]


def test_a_rank_that_does_not_send_is_named():
    with FourRanks() as connection:
        sending = [
            connection.threads.submit(
                connection.ranks[rank].send, 1, Source(connection.plan, rank, 1).iter_local(), SECONDS
            )
            for rank in (0, 1, 3)
        ]
        with pytest.raises(WeightSyncError, match=r"bucket 1 of \d did not arrive from training rank 2 within 0\.5 s"):
            list(connection.receiver.recv(1, 0.5))
        assert all(isinstance(sent.exception(SECONDS), WeightUpdateAborted) for sent in sending)


def test_ranks_may_connect_before_the_first_and_are_told_if_it_is_on_another_host(monkeypatch):
    plan = SharedMemoryTransport().prepare(stages(), 1, uuid.uuid4().hex, 512, 4)
    with ThreadPoolExecutor(3) as threads:
        others = [threads.submit(SharedMemoryTransport().connect, plan, "send", rank) for rank in (3, 2, 1)]
        ends = [SharedMemoryTransport().connect(plan, "send", 0), *(other.result(SECONDS) for other in others)]
    for end in ends:
        end.close()
    monkeypatch.setattr(shared_memory, "ATTACH_SECONDS", 0.01)
    with pytest.raises(WeightSyncError, match="training rank 1 does not see the shared memory of training rank 0"):
        SharedMemoryTransport().connect(replace(plan, session=uuid.uuid4().hex), "send", 1)


def test_an_update_after_a_failure_of_one_rank_brings_new_bytes_alone():
    def break_off(rank, weights):
        if rank == 3:
            yield next(weights)
            raise RuntimeError("no more weights")
        yield from weights

    with FourRanks() as connection:
        for version in (1, 3):
            sending = connection.send(version, break_off)
            with pytest.raises(WeightUpdateAborted):
                list(connection.receiver.recv(version, SECONDS))
            assert all(sent.exception(SECONDS) for sent in sending)
            sending = connection.send(version + 1)
            chunks = connection.receiver.recv(version + 1, SECONDS)
            arrived = {name: tensor.clone() for chunk in chunks for name, tensor in chunk.tensors}
            assert bytes_of(arrived) == bytes_of(wholes(version + 1))
            assert all(sent.result(SECONDS) for sent in sending)


def test_a_sender_killed_before_anyone_attached_leaves_nothing():
    name = SharedSegment.name_of(uuid.uuid4().hex)
    program = (
        "import os, signal\nfrom enginehouse.weights.transports.shared_segment import SharedSegment\n"
        f"segment = SharedSegment.create({name!r}, 4096)\nprint(os.path.exists('/dev/shm/{name}'), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (killed.returncode, killed.stdout.strip()) == (-signal.SIGKILL, "True")
    limit = time.monotonic() + 60
    while Path("/dev/shm", name).exists():
        assert time.monotonic() < limit, "the resource tracker did not remove the segment"


def test_a_receiving_process_that_ends_leaves_the_segment_to_others_and_is_silent():
    name = SharedSegment.name_of(uuid.uuid4().hex)
    segment = SharedSegment.create(name, 4096)
    segment.memory[:5] = b"hello"
    program = (
        "from enginehouse.weights.transports.shared_segment import SharedSegment\n"
        f"print(bytes(SharedSegment.attach({name!r}).memory[:5]).decode())"
    )
    for _ in range(2):
        ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, "hello\n", "")
    segment.unlink()
    assert not Path("/dev/shm", name).exists()


def test_more_named_memory_than_there_is_is_an_error_that_says_so():
    name = SharedSegment.name_of(uuid.uuid4().hex)
    total = os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize
    with pytest.raises(WeightSyncError, match=rf"needs {2 * total} bytes of /dev/shm, and \d+ are free"):
        SharedSegment.create(name, 2 * total)
    assert not Path("/dev/shm", name).exists()


def test_a_model_larger_than_the_memory_is_refused_with_both_figures_when_connected():
    total = psutil.virtual_memory().total
    plan = SharedMemoryTransport().prepare([ParamMeta("w", "uint8", (2 * total,))], 1, uuid.uuid4().hex, 512)
    with pytest.raises(WeightSyncError, match=rf"{2 * total / 2**20:.0f} MiB of memory are needed .* \d+ MiB are free"):
        SharedMemoryTransport().connect(plan, "send", 0)
    assert not left_over(plan.session)


def test_a_sender_whose_memory_cannot_be_opened_is_told_with_what_is_needed():
    plan = make_plan(1)
    sender = SharedMemoryTransport().connect(plan, "send", 0)
    control = ControlBlock(plan, create=False)
    control[PROCESS] = 2**22 + 1  # as in another PID namespace: no such process here
    with pytest.raises(WeightSyncError, match=r"/proc/4194305/fd/\d+'?\. .* one PID namespace"):
        SharedMemoryTransport().connect(plan, "recv", 0)
    control[PROCESS], control[DESCRIPTOR] = os.getpid(), os.open(os.devnull, os.O_RDWR)
    with pytest.raises(WeightSyncError, match="one PID namespace"):
        SharedMemoryTransport().connect(plan, "recv", 0)
    os.close(control[DESCRIPTOR])
    sender.close()


def test_a_receiver_without_a_sender_on_its_host_is_told_so():
    with pytest.raises(WeightSyncError, match="one host"):
        SharedMemoryTransport().connect(make_plan(1), "recv", 0)
