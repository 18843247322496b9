"""Processes that are the other end of a transport, and what they run.

In a module of its own because the processes import it by name. They are not forked: torch may have threads by then,
and a copy of a process has none of them.
"""

import multiprocessing
import os
import signal
from contextlib import contextmanager

import torch
from transport_weights import MODEL, bytes_of, random_weights

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
            if i == 5:  # of the third bucket, so the first was taken
                os.kill(os.getpid(), signal.SIGKILL)
            yield item

    session = connected(plan, "send", index)
    pipe.send(address_of(session, "localhost"))
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
