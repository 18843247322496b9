"""Memory that a receiver holds is not written, memory that it lets go of is used again, and there is no more of it."""

import os
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import psutil
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transport_weights import MODEL, bytes_of, metadata, random_weights

from enginehouse.engines.weights import HostMemory, WeightSyncError
from enginehouse.weights.host_memory import map_privately
from enginehouse.weights.transports.control_block import HOLDS
from enginehouse.weights.transports.shared_memory import SharedMemoryTransport
from enginehouse.weights.transports.shared_segment import SharedSegment

SECONDS = 20.0
WEIGHTS = [random_weights(MODEL, version) for version in range(12)]
BYTES = [bytes_of(weights) for weights in WEIGHTS]


def bytes_in(memory):
    """What another process would read in it."""
    there = bytes(map_privately(memory.path))
    sizes = {name: len(content) for name, content in BYTES[0].items()}
    return {name: there[begin : begin + sizes[name]] for name, begin in memory.offsets.items()}


class Replica:
    """What an engine does that holds what it serves: `served` and `staged` are memory and version."""

    def __init__(self, session):
        self.session = session
        self.served = self.staged = None

    def receive(self, version, holds=True, buckets=None):
        """Stage an update; stop after some buckets if told so."""
        with closing(self.session.recv(version, SECONDS)) as chunks:
            for number, chunk in enumerate(chunks):
                if number == buckets:
                    break
                if holds:
                    chunk.memory.hold()
                    self.staged = chunk.memory, version

    def commit(self):
        """Serve what is staged, or nothing that is held."""
        before, self.served, self.staged = self.served, self.staged, None
        if before is not None:
            before[0].release()

    def give_up(self):
        """Stay with what is served."""
        staged, self.staged = self.staged, None
        if staged is not None:
            staged[0].release()

    def drop(self):
        """The same, without a word."""
        self.staged = None

    def linger(self):
        """Neither: it is thrown away when the next update is staged."""


class House:
    """A sender and two replicas."""

    def __init__(self, threads):
        transport = SharedMemoryTransport()
        self.threads = threads
        self.plan = transport.prepare(metadata(WEIGHTS[0]), 2, uuid.uuid4().hex, 1024)
        self.sender = transport.connect(self.plan, "send", 0)
        self.replicas = [Replica(transport.connect(self.plan, "recv", index)) for index in range(2)]

    def update(self, version, weights=None, **options):
        """Send to both; whether it left whole, and arrived so at each."""
        items = iter((WEIGHTS[version] if weights is None else weights).items())
        calls = [self.threads.submit(one.receive, version, **options) for one in self.replicas]
        calls.append(self.threads.submit(self.sender.send, version, items, SECONDS))
        return [call.exception(SECONDS) for call in calls] == [None] * 3

    def held(self):
        return [held for one in self.replicas for held in (one.served, one.staged) if held is not None]

    def areas(self):
        """Labels of this connection's memory that is open in this process."""
        found = set()
        for descriptor in os.listdir("/proc/self/fd"):
            try:
                link = os.readlink(f"/proc/self/fd/{descriptor}")
            except FileNotFoundError:
                continue
            if SharedSegment.name_of(self.plan.session) in link and link.startswith("/memfd"):
                found.add(link)
        return found

    def close(self):
        for one in self.replicas:
            one.session.close()
        self.sender.close()


@contextmanager
def house():
    with ThreadPoolExecutor(3) as threads, closing(House(threads)) as made:
        yield made


def label_of(memory):
    return os.readlink(memory.path)


def whole(made, version, *endings):
    assert made.update(version)
    for one, ending in zip(made.replicas, endings, strict=True):
        getattr(one, ending)()


endings = st.sampled_from(["commit", "give_up", "drop", "linger"])
updates = st.one_of(
    st.tuples(st.just("whole"), endings, endings),
    st.tuples(st.just("copied"), endings, endings),
    st.tuples(st.just("sender fails"), st.integers(0, len(MODEL) - 1), st.none()),
    st.tuples(st.just("receivers stop"), st.integers(1, 2), st.none()),
)


@given(st.lists(updates, max_size=len(WEIGHTS) - 1))
@example([("whole", "commit", "commit"), ("whole", "commit", "give_up"), ("whole", "commit", "commit")] * 3)
@example([("whole", "commit", "linger"), ("sender fails", 5, None), ("whole", "commit", "commit")] * 3)
@settings(max_examples=40, deadline=None)
def test_what_is_held_stays_as_it_was_and_there_is_one_area_more_than_held(sequence):
    with house() as made:
        for version, (kind, *how) in enumerate(sequence, start=1):
            before = {label_of(memory) for memory, _ in made.held()}
            if kind in ("whole", "copied"):
                assert made.update(version, holds=kind == "whole")
                assert len(made.areas() - before) <= 1
                for one, ending in zip(made.replicas, how, strict=True):
                    if kind == "whole":
                        assert bytes_in(one.staged[0]) == BYTES[version]
                    getattr(one, ending)()
            else:
                broken = dict(list(WEIGHTS[version].items())[: how[0]])
                told = {"weights": broken} if kind == "sender fails" else {"buckets": how[0]}
                assert not made.update(version, **told)
                for one in made.replicas:
                    one.give_up()
            assert [bytes_in(memory) == BYTES[number] for memory, number in made.held()] == [True] * len(made.held())


def test_two_replicas_share_one_area_and_the_one_before_is_written_next():
    with house() as made:
        used = []
        for version in range(1, 6):
            whole(made, version, "commit", "commit")
            (label,) = {label_of(one.served[0]) for one in made.replicas}
            used.append(label)
        assert len(set(used[:2])) == 2
        assert used == (used[:2] * 3)[:5]


def test_a_replica_that_went_back_costs_one_area_until_it_serves_the_newest_again():
    with house() as made:
        whole(made, 1, "commit", "commit")
        whole(made, 2, "commit", "give_up")
        whole(made, 3, "commit", "give_up")
        assert len(made.areas()) == 3
        whole(made, 4, "commit", "commit")
        whole(made, 5, "commit", "commit")
        whole(made, 6, "commit", "commit")
        assert len(made.areas()) == 2


def test_engines_that_hold_nothing_need_one_area():
    with house() as made:
        for version in range(1, 5):
            assert made.update(version, holds=False)
            assert len(made.areas()) == 1


def memories(made, version):
    """Of an update in which nothing was held, each replica's memory."""

    def take(one):
        (memory,) = {id(chunk.memory): chunk.memory for chunk in one.session.recv(version, SECONDS)}.values()
        return memory

    calls = [made.threads.submit(take, one) for one in made.replicas]
    made.sender.send(version, iter(WEIGHTS[version].items()), SECONDS)
    return [call.result(SECONDS) for call in calls]


def test_all_chunks_of_an_update_have_one_memory_for_each_replica():
    with house() as made:
        assert all(isinstance(memory, HostMemory) for memory in memories(made, 1))


def test_a_hold_that_comes_too_late_is_refused_and_takes_nothing_from_the_next_update():
    with house() as made:
        late = memories(made, 1)
        assert made.update(2)  # staged and held where the first lay
        for memory, one in zip(late, made.replicas, strict=True):
            with pytest.raises(WeightSyncError, match="update 1 is over"):
                memory.hold()
            memory.release()
            one.commit()
        del late, memory
        assert made.update(3)
        assert [bytes_in(one.served[0]) == BYTES[2] for one in made.replicas] == [True, True]


def test_a_release_is_for_good_and_both_may_be_said_twice():
    with house() as made:
        found = memories(made, 1)
        for memory in found:
            memory.hold()
            memory.hold()
        for memory in found:
            memory.release()
            memory.release()
            with pytest.raises(WeightSyncError, match="update 1 is over"):
                memory.hold()
        assert made.update(2, holds=False)
        assert len(made.areas()) == 1, "a hold that was refused holds nothing"


def test_what_is_held_stays_held_however_late_it_is_said_again():
    with house() as made:
        found = memories(made, 1)
        for memory in found:
            memory.hold()
        assert made.update(2)
        for memory in found:
            memory.hold()
        assert made.update(3)
        assert [bytes_in(memory) == BYTES[1] for memory in found] == [True, True]
        del found, memory


def test_what_is_held_outlives_the_connection():
    with house() as made:
        whole(made, 1, "commit", "commit")
        held = [one.served[0] for one in made.replicas]
    assert [bytes_in(memory) == BYTES[1] for memory in held] == [True, True]
    for memory in held:
        memory.release()
    del memory, held
    made.replicas.clear()
    assert made.areas() == set()


def test_an_engine_that_hoards_what_it_let_go_of_is_offered_no_more_and_goes_on_copying():
    with house() as made:
        hoard = [memories(made, version) for version in range(1, len(HOLDS) + 2)]
        assert [found.count(None) for found in hoard] == [0] * len(HOLDS) + [2]
        del hoard[0]
        assert None not in memories(made, len(HOLDS) + 2)


def test_a_hold_between_the_senders_look_at_holds_and_its_first_write_is_refused():
    with house() as made:
        late = memories(made, 1)
        refused = []
        look = made.sender._control.held_serials

        def looked():
            seen = look()
            for memory in late:
                with pytest.raises(WeightSyncError, match="update 1 is over"):
                    memory.hold()
                refused.append(memory)
            return seen

        made.sender._control.held_serials = looked
        assert made.update(2)
        assert refused == late


def test_an_update_that_begins_in_the_midst_of_a_hold_leaves_the_memory_alone_or_the_hold_is_refused():
    with house() as made:
        late = memories(made, 1)
        control = made.replicas[0].session._control
        fence = control.fence

        def overtaken():
            control.fence = fence
            assert made.update(2)
            fence()

        control.fence = overtaken
        with pytest.raises(WeightSyncError, match="update 1 is over"):
            late[0].hold()
        assert [one.staged[1] for one in made.replicas] == [2, 2]
        assert [bytes_in(one.staged[0]) == BYTES[2] for one in made.replicas] == [True, True]


def test_too_little_memory_for_a_second_area_leaves_what_is_held_and_later_updates_go_on(monkeypatch):
    with house() as made:
        whole(made, 1, "commit", "commit")
        free = psutil.virtual_memory()
        with monkeypatch.context() as patched:
            patched.setattr(psutil, "virtual_memory", lambda: free._replace(available=1))
            sending = made.threads.submit(made.sender.send, 2, iter(WEIGHTS[2].items()), SECONDS)
            for one in made.replicas:
                with pytest.raises(WeightSyncError, match="update 2 was aborted"):
                    one.receive(2)
            with pytest.raises(WeightSyncError, match=r"MiB of memory are needed .* in addition .* 0 MiB are free"):
                sending.result(SECONDS)
        assert [bytes_in(one.served[0]) == BYTES[1] for one in made.replicas] == [True, True]
        whole(made, 3, "commit", "commit")
        assert [bytes_in(one.served[0]) == BYTES[3] for one in made.replicas] == [True, True]
