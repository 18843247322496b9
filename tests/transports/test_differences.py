"""After any updates, failures and new connections a replica has the sender's bits, and what it holds stays the same."""

import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace

import psutil
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transport_weights import DTYPES, bytes_of, metadata, random_weights

from enginehouse.engines.weights import ParamMeta, WeightSyncError
from enginehouse.weights.checksums import checksum
from enginehouse.weights.host_memory import map_privately
from enginehouse.weights.parts import as_slices, held_by, parts_of
from enginehouse.weights.transports.ends import address_of
from enginehouse_transports import differences
from enginehouse_transports.differences import DifferencesTransport, find_changes, make_changes
from enginehouse_transports.point_to_point import PointToPointSender, PointToPointTransport

SECONDS = 20.0
SHAPES = [
    ((40, 50), "bfloat16"), ((48, 30), "float32"), ((2000,), "int8"), ((), "float64"), ((0, 3), "int8"),
    ((70, 20), "float8_e4m3fn"), ((9, 90), "int64"), ((600,), "bool"), ((31, 33), "bfloat16"),
]  # fmt: skip
SPLITS = ("S0", "S1", "R", "R", "R", "S1", "S0", "R", "S1")
RANKS = REPLICAS = 2


def changed(weights, share, seed):
    """The weights with other bits in about a share of the elements."""
    generator = torch.Generator().manual_seed(seed)
    other = {}
    for name, tensor in weights.items():
        raw = tensor.clone().reshape(-1).view(torch.uint8).view(-1, max(tensor.itemsize, 1))
        raw[torch.rand(len(raw), generator=generator) < share, 0] ^= 1
        other[name] = raw.view(-1).view(tensor.dtype).reshape(tensor.shape)
    return other


class Replica:
    """What an engine does that holds what it serves: `served` and `staged` are memory and bytes."""

    def __init__(self):
        self.served = self.staged = None

    def receive(self, session, version, holds, buckets):
        """Stage an update; stop after some buckets if told so. What arrived, and the checksums of its parts."""
        arrived, sums = {}, {}
        with closing(session.recv(version, SECONDS)) as chunks:
            for number, chunk in enumerate(chunks):
                if number == buckets:
                    break
                if holds:
                    chunk.memory.hold()
                    self.staged = chunk.memory, {}
                for name, tensor in chunk.tensors:
                    arrived |= bytes_of({name: tensor})
                    sums |= {part: checksum(view) for part, view in chunk.parts.get(name, [(name, tensor)])}
        if holds:
            self.staged = chunk.memory, arrived
        return arrived, sums

    def end(self, commits):
        """Serve what is staged, or stay with what is served."""
        released, self.staged = self.staged, None
        if commits:
            released, self.served = self.served, released
        if released is not None:
            released[0].release()

    def check(self):
        """That held memory has the bytes of its version, as another process would read them."""
        for memory, content in filter(None, (self.served, self.staged)):
            there = bytes(map_privately(memory.path))
            for name, held in content.items():
                begin = memory.offsets[name]
                assert there[begin : begin + len(held)] == held


class House:
    """Two training ranks with parts of the weights, and two replicas that hold all of each."""

    transport = DifferencesTransport

    def __init__(self, threads):
        self.threads = threads
        self.weights = random_weights(SHAPES, 0)
        self.parameters = [
            replace(meta, owners=(0, 1), mesh_shape=(2,), placements=(split,))
            for meta, split in zip(metadata(self.weights), SPLITS, strict=True)
        ]
        self.replicas = [Replica() for _ in range(REPLICAS)]
        self.version = 0
        self.senders = self.receivers = ()
        self.connect()

    def connect(self):
        self.close()
        transport = self.transport()
        self.plan = transport.prepare(self.parameters, REPLICAS, uuid.uuid4().hex, 4096, RANKS)
        self.senders = [transport.connect(self.plan, "send", rank) for rank in range(RANKS)]
        reached = self.plan.reached([address_of(sender, "localhost") for sender in self.senders])
        self.receivers = [transport.connect(reached, "recv", index) for index in range(REPLICAS)]

    def source(self, rank, fails_at):
        for number, (meta, region) in enumerate(parts_of(self.parameters, rank)):
            if number == fails_at:
                raise MemoryError("no room on this rank")
            yield meta.name, self.weights[meta.name][as_slices(region)]

    def update(self, share=0.02, *, holds=True, fails_at=None, buckets=None):
        """Change the weights, and send them: the error of each replica and rank."""
        self.version += 1
        self.weights = changed(self.weights, share, self.version)
        arriving = [
            self.threads.submit(replica.receive, session, self.version, holds, buckets)
            for replica, session in zip(self.replicas, self.receivers, strict=True)
        ]
        sending = [
            self.threads.submit(sender.send, self.version, self.source(rank, fails_at if rank == 0 else None), SECONDS)
            for rank, sender in enumerate(self.senders)
        ]
        errors = [call.exception(SECONDS) for call in [*arriving, *sending]]
        if not any(errors) and buckets is None:
            sent = sending[0].result() | sending[1].result()
            for call in arriving:
                assert call.result() == (bytes_of(self.weights), sent)
        for replica in self.replicas:
            replica.check()
        return errors

    def end(self, commits=True):
        for replica in self.replicas:
            replica.end(commits)
            replica.check()

    def whole(self, share=0.02, **options):
        """An update that works and is served."""
        assert self.update(share, **options) == [None] * (RANKS + REPLICAS)
        self.end()

    def close(self):
        for session in [*self.receivers, *self.senders]:
            session.close()


@contextmanager
def house():
    with ThreadPoolExecutor(RANKS + REPLICAS) as threads, closing(House(threads)) as made:
        yield made


steps = st.one_of(
    st.tuples(st.sampled_from(["commit", "copy", "give up"]), st.sampled_from([0.0, 0.02, 0.02, 0.3, 1.0])),
    st.tuples(st.just("sender fails"), st.integers(0, len(SHAPES) - 1)),
    st.tuples(st.just("receivers stop"), st.integers(0, 2)),
    st.tuples(st.just("abort"), st.sampled_from(["sender", "receiver", "before"])),
    st.tuples(st.just("connect"), st.none()),
)


def take(made, step):
    kind, how = step
    if kind in ("commit", "copy", "give up"):
        assert made.update(how, holds=kind != "copy") == [None] * (RANKS + REPLICAS)
        made.end(kind == "commit")
    elif kind == "abort":  # of a whole update, or of one that has not begun
        made.version += how == "before"
        (made.senders if how == "sender" else made.receivers)[0].abort(made.version)
    elif kind == "connect":
        made.connect()
    else:
        errors = made.update(**{"fails_at" if kind == "sender fails" else "buckets": how})
        assert all(errors) if kind == "sender fails" else all(errors[REPLICAS:])
        made.end(commits=False)


def take_all(made, sequence):
    for step in sequence:
        take(made, step)


@given(st.lists(steps, max_size=12))
@example([("commit", 0.02)] * 5)
@example([("copy", 0.02)] * 4)
@example([("commit", 0.02), ("sender fails", 5), ("commit", 0.02), ("commit", 0.02), ("receivers stop", 2)] * 2)
@settings(max_examples=40, deadline=None)
def test_after_anything_that_fails_the_next_update_arrives_bit_for_bit(sequence):
    with house() as made:
        take_all(made, [*sequence, ("copy", 0.02), ("commit", 0.02)])


FAILS = [("sender fails", 5), ("receivers stop", 2)]


def keep_the_sender_sure(patch):
    """A sender that does not notice that an update failed."""

    def send(self, version, source, deadline):
        self._base = version - 1
        return PointToPointSender._send(self, version, source, deadline)

    patch.setattr(differences.DifferencesSender, "_send", send)


def keep_the_replica_sure(patch):
    """A replica that takes every update for complete."""
    note = differences.DifferencesReceiver._note_arrival

    def noted(self, heading, content):
        self._arrival.taken = len(self._plan.buckets)
        note(self, heading, content)

    patch.setattr(differences.DifferencesReceiver, "_note_arrival", noted)


def forget_holds(patch):
    patch.setattr(differences.Area, "is_held", False)


def lose_changes(patch):
    patch.setattr(differences, "make_changes", lambda changes, target: None)


def change_another_base(patch):
    made = differences.AreaArrival.__init__
    patch.setattr(
        differences.AreaArrival,
        "__init__",
        lambda self, version, area, left, base, unchanged: made(self, version, area, left, base, area.buckets),
    )


def keep_what_was_sent_first(patch):
    pack = differences.DifferencesSender._pack

    def packed(self, name, piece):
        kept = self._kept.get(name, piece).clone()
        base, content = pack(self, name, piece)
        self._kept[name] = kept
        return base, content

    patch.setattr(differences.DifferencesSender, "_pack", packed)


@pytest.mark.parametrize(
    ("breaks", "sequence"),
    [
        ([lose_changes], []),
        ([change_another_base], []),
        ([keep_what_was_sent_first], []),
        ([forget_holds], []),
        ([keep_the_sender_sure, keep_the_replica_sure], FAILS[:1]),
        ([keep_the_sender_sure, keep_the_replica_sure], FAILS[1:]),
    ],
    ids=["changes lost", "wrong base", "old copy kept", "held is overwritten", "half sent", "half taken"],
)
def test_what_is_broken_is_found(breaks, sequence, monkeypatch):
    for each in breaks:
        each(monkeypatch)
    with house() as made, pytest.raises(AssertionError):
        take_all(made, [("commit", 0.02), *sequence, *[("commit", 0.02)] * 3])


@pytest.mark.parametrize("fails", FAILS)
def test_a_replica_refuses_changes_of_what_it_does_not_have_and_the_next_update_is_whole(fails, monkeypatch):
    with house() as made:
        made.whole()
        with monkeypatch.context() as patch:
            keep_the_sender_sure(patch)
            take(made, fails)
            errors = made.update()
        assert all(errors)
        said = "was sent what changed since version 2 of the weights, but has no complete version to change"
        assert any(said in str(error) for error in errors[:REPLICAS])  # the other is aborted, perhaps before it sees
        made.end(commits=False)
        made.whole()


def moved(made, **options):
    """Bytes that an update sends."""
    made.whole(**options)
    return sum(receiver.bytes_arrived for receiver in made.receivers)


def test_only_what_changed_is_sent_if_it_is_less_than_half():
    with house() as made:
        plan = PointToPointTransport().prepare(made.parameters, REPLICAS, "", 4096, RANKS)
        assert moved(made) == plan.bytes_moved
        assert moved(made, share=0.02) < 0.15 * plan.bytes_moved  # small parts: their headings weigh
        assert moved(made, share=1.0) == plan.bytes_moved
        made.connect()
        assert moved(made, share=0.0) == plan.bytes_moved, "a new connection begins with all"
        assert moved(made, share=0.0) < 0.05 * plan.bytes_moved


def test_memory_is_that_of_the_served_and_the_next_version():
    with house() as made:
        paths = set()
        for _ in range(6):
            made.whole()
            paths |= {replica.served[0].path for replica in made.replicas}
        assert len(paths) == 2 * REPLICAS


def test_engines_that_hold_nothing_need_the_memory_of_one_version():
    with house() as made:
        for _ in range(3):
            made.whole(holds=False)
            assert [len(receiver._areas) for receiver in made.receivers] == [1] * REPLICAS


def test_what_is_held_outlives_the_connection():
    with house() as made:
        made.whole()
    for replica in made.replicas:
        replica.check()


def test_a_hold_that_comes_too_late_is_refused():
    with house() as made:
        made.update()
        (memory, _), (other, _) = (replica.staged for replica in made.replicas)
        made.end(commits=False)
        with pytest.raises(WeightSyncError, match="update 1 is over"):
            memory.hold()
        made.update(holds=False)
        with pytest.raises(WeightSyncError, match="update 1 is over"):
            other.hold()


def test_too_little_memory_is_said_by_the_replica_and_the_next_update_works(monkeypatch):
    with house() as made:
        made.whole()
        free = psutil.virtual_memory()
        with monkeypatch.context() as patch:
            patch.setattr(psutil, "virtual_memory", lambda: free._replace(available=1))
            errors = made.update()
        said = "MiB of memory are needed to assemble a version of the weights"
        assert any(said in str(error) for error in errors[:REPLICAS])
        made.end(commits=False)
        made.whole()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 255, 256, 257, 5000])
def test_changes_make_the_new_bits_of_the_old(dtype, count):
    old = random_weights([((count,), dtype)], 1)
    for share in (0.0, 0.003, 0.1):
        new = changed(old, share, 2)["p0"]
        changes = find_changes(old["p0"], new)
        if changes is None:
            assert share > 0.0
            continue
        assert 2 * changes.nbytes < new.nbytes
        patched = old["p0"].clone()
        for _ in range(2):  # values are set, so nothing is lost if they are set again
            make_changes(changes, patched)
            assert bytes_of({"": patched}) == bytes_of({"": new})


def test_bits_are_compared_not_numbers():
    old = torch.tensor([0.0, float("nan"), 1.0] + [2.0] * 60)
    new = old.clone()
    new[0] = -0.0
    changes = find_changes(old, new)
    assert len(changes) == 5, "NaN is the same NaN, and -0.0 is not 0.0"
    make_changes(changes, old)
    assert bytes_of({"": old}) == bytes_of({"": new})


def test_a_part_of_a_matrix_is_changed_in_place():
    meta = ParamMeta("a", "int16", (8, 60), (0, 1), (2,), ("S1",))
    whole = torch.zeros(8, 60, dtype=torch.int16)
    part = whole[as_slices(held_by(meta, 1))]
    new = part.clone(memory_format=torch.contiguous_format)
    new[3, 7] = 5
    make_changes(find_changes(torch.zeros_like(new), new), part)
    assert whole.nonzero().tolist() == [[3, 37]]
