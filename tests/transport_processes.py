"""Processes that are the other end of a transport, and what they run.

In a module of its own because the processes import it by name. They are not forked: torch may have threads by then,
and a copy of a process has none of them.
"""

import multiprocessing
import os
import signal
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch
from transport_weights import MODEL, bytes_of, metadata, random_weights

from enginehouse.engines.weights import ParamMeta, WeightSyncError
from enginehouse.weights.checksums import checksum
from enginehouse.weights.parts import held_by, parts_of
from enginehouse.weights.transports.ends import address_of, weights_for
from enginehouse.weights.transports.lookup import load_transport

forkserver = multiprocessing.get_context("forkserver")
forkserver.set_forkserver_preload(["pytest", "torch", "enginehouse_transports.point_to_point"])

SECONDS = 120.0
FOREVER = 3600.0  # a deadline no test waits for: what ends before it ended for another reason
UPDATES = 3

ENDING_SECONDS = 60.0
"""Far more than a killed process needs to be gone."""

SHAPES = [
    ((13, 8), "float32"), ((8, 13), "bfloat16"), ((5,), "float32"), ((), "float64"), ((0, 3), "int8"), ((4, 6), "int64")
]  # fmt: skip


@contextmanager
def started(run, plan, index=0):
    """A process that runs `run(plan, index, pipe)`, and the pipe to it."""
    ours, theirs = forkserver.Pipe()
    process = forkserver.Process(target=run, args=(plan, index, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield process, ours
    finally:
        process.kill()
        process.join(ENDING_SECONDS)


def connected(plan, role, index):
    """An end of the plan's transport."""
    return load_transport(plan.transport).connect(plan, role, index)


def receive_updates(plan, index, pipe):
    """A replica: says what arrived, of each of `UPDATES`."""
    session = connected(plan, "recv", index)
    pipe.send("connected")
    for version in range(1, UPDATES + 1):
        pipe.send(bytes_of({n: t.clone() for chunk in session.recv(version, SECONDS) for n, t in chunk.tensors}))
    session.close()


def receive_one_bucket(plan, index, pipe):
    """A replica that stops in the middle of an update."""
    chunks = connected(plan, "recv", index).recv(1, FOREVER)
    next(chunks)
    pipe.send("has a bucket")
    pipe.recv()


def send_half(plan, index, pipe):
    """A training rank that is killed in an update."""

    def weights():
        for i, item in enumerate(random_weights(MODEL, 1).items()):
            if i == 5:  # of the third bucket
                os.kill(os.getpid(), signal.SIGKILL)
            yield item

    session = connected(plan, "send", index)
    pipe.send(address_of(session, "localhost"))
    pipe.recv()  # once the receiver is connected
    session.send(1, weights(), FOREVER)


def wholes(version: int) -> dict[str, torch.Tensor]:
    """The weights of an update."""
    weights = random_weights(SHAPES, version)
    return {**weights, "twice": weights["p5"] + 1, "everywhere": weights["p5"] + 2}


def part(whole: torch.Tensor, meta: ParamMeta, rank: int) -> torch.Tensor:
    """A rank's part; how metadata cut is tested beside `plan_reshard`."""
    return whole[tuple(slice(*bounds) for bounds in held_by(meta, rank))]


class Source:
    """The weights of one training rank."""

    def __init__(self, plan, rank, version):
        self.plan, self.rank, self.version = plan, rank, version

    def iter_local(self):
        for meta, _ in parts_of(self.plan.parameters, self.rank):
            yield meta.name, part(wholes(self.version)[meta.name], meta, self.rank)

    def iter_full(self):
        raise AssertionError("nothing is to be gathered")


def train(plan, rank, pipe):
    """A training rank: sends an update for each version it is told."""
    session = connected(plan, "send", rank)
    pipe.send(address_of(session, "localhost"))
    while version := pipe.recv():
        try:
            pipe.send(session.send(version, weights_for(session, Source(plan, rank, version)), SECONDS))
        except WeightSyncError as error:
            pipe.send(error)
    session.close()


def replica(plan, index, pipe):
    """A replica: answers with what arrived, and the checksums of the parts it came in."""
    session = connected(plan, "recv", index)
    while version := pipe.recv():
        found, sums = {}, {}
        try:
            for chunk in session.recv(version, SECONDS):
                for name, tensor in chunk.tensors:
                    found |= bytes_of({name: tensor})
                    parts = chunk.parts.get(name, [(name, tensor)])
                    sums |= {piece: checksum(view) for piece, view in parts}
            pipe.send((found, sums))
        except WeightSyncError as error:
            pipe.send(error)
    session.close()


def stages(tensor: int = 2, pipeline: int = 2, data: int = 1) -> list[ParamMeta]:
    """`SHAPES` over pipeline stages of data-parallel groups of tensor-parallel ranks; the last also split twice."""
    width = tensor * data
    found = []
    splits = ("S0", "S1", "R", "R", "R", "S1")
    for number, (meta, split) in enumerate(zip(metadata(random_weights(SHAPES, 0)), splits, strict=True)):
        first = number % pipeline * width
        owners = tuple(range(first, first + width))
        found.append(replace(meta, owners=owners, mesh_shape=(data, tensor), placements=("R", split)))
    found.append(found[-1])
    found[-1] = replace(found[-1], name="twice", owners=(0, 1, 2, 3), mesh_shape=(2, 2), placements=("S0", "S0"))
    found.append(replace(found[-1], name="everywhere", owners=(), mesh_shape=(), placements=()))
    return found


@contextmanager
def running(plan):
    """Every rank and every replica in a process of its own: the pipes to them."""
    with ExitStack() as stack:
        ranks = [stack.enter_context(started(train, plan, rank)) for rank in range(plan.senders)]
        reached = plan.reached([pipe.recv() for _, pipe in ranks])
        replicas = [stack.enter_context(started(replica, reached, index)) for index in range(plan.receivers)]
        yield ranks, replicas


def updated(ranks, replicas, version):
    """What the replicas and the ranks say of an update."""
    for _, pipe in [*ranks, *replicas]:
        pipe.send(version)
    return [pipe.recv() for _, pipe in replicas], [pipe.recv() for _, pipe in ranks]


def assert_sums_agree(arrived, sent):
    together = {}
    for sums in sent:
        assert all(together.get(name, value) == value for name, value in sums.items())
        together |= sums
    for _, sums in arrived:
        assert sums.items() <= together.items()
    assert set().union(*(sums for _, sums in arrived)) == set(together)
