"""What arrives is what was sent: every bit, in order, in any cut, and no more of it at once than was allowed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch

from enginehouse.engines.weights import HostMemory, TransportSession
from enginehouse.weights.checksums import checksum
from enginehouse.weights.host_memory import map_privately
from enginehouse_testing.check import EXACT, PROTOCOL, Check, Measured, Seen, wrong
from enginehouse_testing.link import Link, Weights, announced, bits, left_over, random_weights

Arrived = list[list[list[tuple[str, torch.Tensor]]]]
BUCKETS = (1, 512, 4096, 1 << 24)
"""From a bucket for each parameter, most of them larger than it, to one for all."""


def judge(seen: list[Seen]) -> Measured:
    """An act's words on what is wrong; empty where nothing is."""
    return wrong(seen[0].value) if seen[0].value else Measured(0.0)


def unlike(arrived: Arrived, sent: Weights) -> str:
    """In words, how what arrived differs from what was sent."""
    for index, buckets in enumerate(arrived):
        flat = [one for bucket in buckets for one in bucket]
        if [name for name, _ in flat] != list(sent):
            return f"receiver {index} got {[name for name, _ in flat]}, not {list(sent)}"
        for name, tensor in flat:
            if bits(tensor) != bits(sent[name]):
                return f"receiver {index} got another {name} ({sent[name].dtype}, {tuple(sent[name].shape)})"
    return ""


def _exact(link: Link) -> str:
    for bucket_bytes in BUCKETS:
        with link.connect(random_weights(0), bucket_bytes) as connection:
            for version in (1, 2, 5):
                sent = random_weights(version)
                arrived, sums = connection.update(version, sent)
                if said := unlike(arrived, sent):
                    return f"version {version} in buckets of {bucket_bytes}: {said}"
                if sums != {name: checksum(tensor) for name, tensor in sent.items()}:
                    return f"version {version}: the checksums send returns are not those of what left"
                planned = [len(bucket) for bucket in connection.plan.buckets]
                if [[len(bucket) for bucket in buckets] for buckets in arrived] != [planned] * link.receivers:
                    return f"version {version}: parameters arrived in other buckets than the plan's"
    return ""


LAYOUTS = (
    ((1, 0, 2, 3), (2, 2), ("S0", "R")),
    ((2, 3), (2,), ("S1",)),
    ((0, 1, 2, 3), (2, 2), ("S0", "S0")),
    ((3,), (), ()),
    ((), (), ()),
)
"""Owners, mesh and placements on four training ranks."""


def _ranks(link: Link) -> str:
    """Parameters of two dimensions, one in each layout, and one without elements in each."""
    shapes = [(shape, "float32") for shape in ((7, 5), (0, 3)) for _ in LAYOUTS]
    parameters = [
        replace(one, owners=owners, mesh_shape=mesh, placements=placements)
        for one, (owners, mesh, placements) in zip(announced(random_weights(0, shapes)), 2 * LAYOUTS, strict=True)
    ]
    with link.connect_ranks(parameters, 4, 256) as connection:
        for version in (1, 2):
            sent = random_weights(version, shapes)
            sending = connection.sending_held(version, sent)
            arriving = [connection.threads.submit(_with_sums, one, version, link) for one in connection.receivers]
            arrived = [one.result(link.seconds) for one in arriving]
            left: dict[str, str] = {}
            for one in sending:
                sums = one.result(link.seconds)
                if differing := [name for name in sums if left.get(name, sums[name]) != sums[name]]:
                    return f"version {version}: two ranks sent {differing[0]}, with other bytes"
                left |= sums
            if said := unlike([buckets for buckets, _ in arrived], sent):
                return f"version {version}: {said}"
            for index, (_, sums) in enumerate(arrived):
                if sums != left:
                    return f"version {version}: what receiver {index} got has not the names and sums of what left"
    return ""


def _with_sums(
    session: TransportSession, version: int, link: Link
) -> tuple[list[list[tuple[str, torch.Tensor]]], dict[str, str]]:
    """Copies of what arrives, bucket by bucket, and the checksums of the parts in which it came."""
    buckets: list[list[tuple[str, torch.Tensor]]] = []
    sums: dict[str, str] = {}
    for chunk in session.recv(version, link.seconds):
        buckets.append([(name, tensor.clone()) for name, tensor in chunk.tensors])
        for name, tensor in chunk.tensors:
            sums |= {part: checksum(view) for part, view in chunk.parts.get(name, [(name, tensor)])}
    return buckets, sums


def _awkward(link: Link) -> str:
    whole = torch.randn(9, 8)
    sent = {
        "transposed": torch.randn(6, 4, requires_grad=True).t(),
        "strided": whole[::2, 1::3],
        "expanded": torch.randn(1, 5).expand(3, 5),
        "a parameter": torch.nn.Parameter(torch.randn(5)),
        "a part of a larger one": whole[3],
    }
    with link.connect(sent, 128) as connection:
        return unlike(connection.update(1, sent)[0], sent)


def _no_parameters(link: Link) -> str:
    with link.connect({}) as connection:
        return unlike(connection.update(1, {})[0], {})


def _reuse(link: Link) -> str:
    """What was sent may be changed once `send` has returned, and no tensor is made long before it is needed."""
    sent = {f"p{number}": torch.full((64,), float(number)) for number in range(12)}
    made = 0

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal made
        for item in sent.items():
            made += 1
            yield item

    if link.senders > 1:
        return ""  # counted for one sender; the others do the same
    with link.connect(sent, 256) as connection:
        failed: list[BaseException] = []

        def send() -> None:
            try:
                connection.senders[0].send(1, gathered(), link.seconds)
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=send)
        streams = [one.recv(1, link.seconds) for one in connection.receivers]
        thread.start()
        for taken, _ in enumerate(zip(*streams, strict=True)):
            if made > taken + 2:
                for session in connection.receivers:
                    session.abort(1)
                thread.join(link.seconds)
                return f"{made} parameters of one bucket each were gathered when {taken} buckets had been taken"
        thread.join(link.seconds)
        return f"{type(failed[0]).__name__}: {failed[0]}" if failed else ""


def _held(link: Link) -> str:
    """Of three updates each receiver holds the first and lets go of it after the second, which it holds as well."""
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
            arriving: list[Future[Any]] = [
                connection.threads.submit(hold, one, version) for one in connection.receivers
            ]
            sending = connection.sending(version, weights[version].items())
            for one in [*arriving, *sending]:
                one.result(link.seconds)
            for held, memory in holding:
                if said := _unlike_in(memory, weights[held]):
                    return f"version {held}, held while {version} was sent: {said}"
            for held, memory in holding:
                if held < version:
                    memory.release()
            holding = [one for one in holding if one[0] == version]
    for held, memory in holding:
        if said := _unlike_in(memory, weights[held]):
            return f"version {held}, held when the connection was closed: {said}"
    return ""


def _unlike_in(memory: HostMemory, sent: Weights) -> str:
    """In words, how what others would map differs from what was sent, as far as it lies there."""
    there = map_privately(memory.path)
    for name, begin in memory.offsets.items():
        if there[begin : begin + sent[name].nbytes] != bits(sent[name])[2]:
            return f"{name} is another"
    return ""


def _cleared(link: Link) -> str:
    weights = random_weights(0)
    with link.connect(weights) as connection:
        connection.update(1, weights)
        session = connection.plan.session
    left = left_over(session)
    with link.connect(weights) as connection:  # closed before anything was sent
        session = connection.plan.session
    left += left_over(session)
    return f"left over after close: {', '.join(left)}" if left else ""


CHECKS = (
    Check(
        name="exact",
        capability=PROTOCOL,
        claim="Every dtype and shape arrives bit for bit at each receiver, in the plan's order and buckets, each time",
        tolerance=EXACT,
        acts=(_exact,),
        judge=judge,
    ),
    Check(
        name="several_ranks",
        capability=PROTOCOL,
        claim="Weights of which four training ranks hold parts arrive whole, under the checksums of what left",
        tolerance=EXACT,
        acts=(_ranks,),
        judge=judge,
    ),
    Check(
        name="awkward_tensors",
        capability=PROTOCOL,
        claim="Tensors that are strided, expanded, parts of others or need gradients arrive as what they hold",
        tolerance=EXACT,
        acts=(_awkward,),
        judge=judge,
    ),
    Check(
        name="no_parameters",
        capability=PROTOCOL,
        claim="An update without parameters ends at once on both sides",
        tolerance=EXACT,
        acts=(_no_parameters,),
        judge=judge,
    ),
    Check(
        name="two_buckets",
        capability=PROTOCOL,
        claim="A sender gathers at most two buckets more than were taken",
        tolerance=EXACT,
        acts=(_reuse,),
        judge=judge,
    ),
    Check(
        name="held",
        capability=PROTOCOL,
        claim="Memory that a receiver is lent stays as it was while it is held; none need be lent",
        tolerance=EXACT,
        acts=(_held,),
        judge=judge,
    ),
    Check(
        name="nothing_left",
        capability=PROTOCOL,
        claim="Nothing in the host's shared memory outlives the connection",
        tolerance=EXACT,
        acts=(_cleared,),
        judge=judge,
    ),
)
