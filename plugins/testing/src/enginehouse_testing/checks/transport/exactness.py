"""Checks that weights arrive bit for bit and in order, in buckets of any size.

Also checks that a sender keeps few gathered buckets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from enginehouse.engines.weights import HostMemory, TransportSession
from enginehouse.weights.checksums import checksum
from enginehouse.weights.host_memory import map_privately
from enginehouse_testing.check import Checks
from enginehouse_testing.link import (
    Buckets,
    Link,
    OpenLink,
    Weights,
    announced,
    bits,
    left_over,
    random_weights,
    receive_with_sums,
)

Arrived = Sequence[Buckets]

BUCKETS = (1, 512, 4096, 1 << 24)
"""Bucket sizes in bytes, from about one parameter per bucket to one bucket for all parameters."""


CHECKS = Checks()


def compare(arrived: Arrived, sent: Weights) -> str:
    """Describe how the received tensors differ from the sent tensors; empty if they are equal."""
    for index, buckets in enumerate(arrived):
        flat = [parameter for bucket in buckets for parameter in bucket]
        if [name for name, _ in flat] != list(sent):
            return f"receiver {index} got {[name for name, _ in flat]}, not {list(sent)}"
        for name, tensor in flat:
            if bits(tensor) != bits(sent[name]):
                return f"receiver {index} got other bits in {name} ({sent[name].dtype}, {tuple(sent[name].shape)})"
    return ""


@CHECKS.act()
def _exact(link: Link) -> str:
    """Every dtype and shape arrives bit for bit at each receiver, in the plan's order and buckets, in every update."""
    for bucket_bytes in BUCKETS:
        with link.connect(random_weights(0), bucket_bytes) as connection:
            weights = {version: random_weights(version) for version in (1, 2, 5)}
            weights[6] = _change_little(weights[5])
            for version, sent in weights.items():
                arrived, sums = connection.update(version, sent)
                if difference := compare(arrived, sent):
                    return f"version {version} in buckets of {bucket_bytes}: {difference}"
                if sums != {name: checksum(tensor) for name, tensor in sent.items()}:
                    return f"version {version}: send returned other checksums than those of the sent weights"
                planned = [len(bucket) for bucket in connection.plan.buckets]
                if [[len(bucket) for bucket in buckets] for buckets in arrived] != [planned] * link.receivers:
                    return f"version {version}: parameters arrived in other buckets than planned"
    return ""


def _change_little(weights: Weights) -> Weights:
    """Return the weights with one other bit in each parameter that is not empty."""
    changed = {name: tensor.clone() for name, tensor in weights.items()}
    for tensor in changed.values():
        tensor.view(-1).view(torch.uint8)[-tensor.itemsize :][:1] ^= 1
    return changed


LAYOUTS = (
    ((1, 0, 2, 3), (2, 2), ("S0", "R")),
    ((2, 3), (2,), ("S1",)),
    ((0, 1, 2, 3), (2, 2), ("S0", "S0")),
    ((3,), (), ()),
    ((), (), ()),
)
"""For each parameter: the ranks that own it, the shape of their mesh, and its placements, on four training ranks."""


@CHECKS.act()
def _several_ranks(link: Link) -> str:
    """Weights whose parts are held by four training ranks arrive complete, with the checksums of the sent parts."""
    # Per layout a parameter of two dimensions, and a parameter without elements.
    shapes = [(shape, "float32") for shape in ((7, 5), (0, 3)) for _ in LAYOUTS]
    parameters = [
        replace(parameter, owners=owners, mesh_shape=mesh, placements=placements)
        for parameter, (owners, mesh, placements) in zip(announced(random_weights(0, shapes)), 2 * LAYOUTS, strict=True)
    ]
    with OpenLink(link, parameters, max(4, link.senders), 256) as connection:
        for version in (1, 2):
            sent = random_weights(version, shapes)
            sending = connection.send_held(version, sent)
            arriving = [
                connection.threads.submit(receive_with_sums, end, version, link.seconds) for end in connection.receivers
            ]
            arrived = [future.result(link.seconds) for future in arriving]
            left: dict[str, str] = {}
            for future in sending:
                sums = future.result(link.seconds)
                if differing := [name for name in sums if left.get(name, sums[name]) != sums[name]]:
                    return f"version {version}: two ranks sent different bytes for {differing[0]}"
                left |= sums
            if difference := compare([buckets for buckets, _ in arrived], sent):
                return f"version {version}: {difference}"
            for index, (_, sums) in enumerate(arrived):
                if sums != left:
                    return f"version {version}: receiver {index} got other names or checksums than were sent"
    return ""


@CHECKS.act()
def _awkward_tensors(link: Link) -> str:
    """Tensors that are strided, expanded, views of others or need gradients arrive with the values they hold."""
    whole = torch.randn(9, 8)
    sent = {
        "transposed": torch.randn(6, 4, requires_grad=True).t(),
        "strided": whole[::2, 1::3],
        "expanded": torch.randn(1, 5).expand(3, 5),
        "a parameter": torch.nn.Parameter(torch.randn(5)),
        "a part of a larger one": whole[3],
    }
    with link.connect(sent, 128) as connection:
        return compare(connection.update(1, sent)[0], sent)


@CHECKS.act()
def _no_parameters(link: Link) -> str:
    """An update without parameters ends at once on both sides."""
    with link.connect({}) as connection:
        return compare(connection.update(1, {})[0], {})


@CHECKS.act()
def _two_buckets(link: Link) -> str:
    """A sender keeps at most two gathered buckets besides the one that receivers take."""
    if link.senders > 1:
        return ""  # counted for one sender; the others do the same
    sent = {f"p{number}": torch.full((64,), float(number)) for number in range(12)}
    made: list[StorageWeakRef] = []

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in sent.items():
            copy = tensor.clone()
            made.append(StorageWeakRef(copy.untyped_storage()))
            yield name, copy

    with link.connect(sent, 256) as connection:
        streams = [receiver.recv(1, link.seconds) for receiver in connection.receivers]
        sending = connection.threads.submit(connection.senders[0].send, 1, gathered(), link.seconds)
        while any([next(stream, None) for stream in streams]):  # noqa: C419 (of all streams)
            kept = sum(not storage.expired() for storage in made)
            if kept > 3:
                for session in connection.receivers:
                    session.abort(1)
                wait([sending], link.seconds)
                return f"the sender kept {kept} gathered buckets"
        wait([sending], link.seconds)
        error = sending.exception(0) if sending.done() else None
        return f"{type(error).__name__}: {error}" if error is not None else ""


@CHECKS.act()
def _held(link: Link) -> str:
    """Memory that is lent to a receiver stays unchanged while the receiver holds it; a transport need not lend any."""
    # Each receiver holds the first of three updates until after the second, and then holds the second.
    holding: list[tuple[int, HostMemory]] = []

    def hold(session: TransportSession, version: int) -> None:
        lent: HostMemory | None = None
        for chunk in session.recv(version, link.seconds):
            if chunk.memory is not None and chunk.memory is not lent:
                lent = chunk.memory
                lent.hold()
                holding.append((version, lent))

    weights = [random_weights(version) for version in range(4)]
    with link.connect(weights[0]) as connection:
        for version in (1, 2, 3):
            calls: list[Future[Any]] = [connection.threads.submit(hold, end, version) for end in connection.receivers]
            calls += connection.send(version, weights[version].items())
            for call in calls:
                call.result(link.seconds)
            for held, memory in holding:
                if difference := _difference_in(memory, weights[held]):
                    return f"version {held} changed in held memory while version {version} was sent: {difference}"
            for held, memory in holding:
                if held < version:
                    memory.release()
            holding = [(held, memory) for held, memory in holding if held == version]
    for held, memory in holding:
        if difference := _difference_in(memory, weights[held]):
            return f"version {held} changed in held memory when the connection was closed: {difference}"
    return ""


def _difference_in(memory: HostMemory, sent: Weights) -> str:
    """Describe how the bytes that another process would map differ from the sent bytes."""
    content = map_privately(memory.path)
    for name, begin in memory.offsets.items():
        if content[begin : begin + sent[name].nbytes] != bits(sent[name])[2]:
            return f"{name} has other bytes"
    return ""


@CHECKS.act()
def _nothing_left(link: Link) -> str:
    """Nothing remains in the host's shared memory after the connection."""
    weights = random_weights(0)
    with link.connect(weights) as connection:
        connection.update(1, weights)
        session = connection.plan.session
    left = left_over(session)
    with link.connect(weights) as connection:  # closed before anything was sent
        session = connection.plan.session
    left += left_over(session)
    return f"left over after close: {', '.join(left)}" if left else ""
