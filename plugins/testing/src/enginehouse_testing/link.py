"""Senders and receivers of a transport under test, in this process, and made-up weights to send."""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from enginehouse.engines.weights import (
    DTYPE_BYTES,
    ParamMeta,
    TransferPlan,
    TransportSession,
    WeightSyncError,
    WeightTransport,
)
from enginehouse.plugin import Transport, capabilities, resolve
from enginehouse.weights.checksums import checksum
from enginehouse.weights.parts import as_slices, parts_of
from enginehouse.weights.transports.ends import address_of, weights_for

Weights = dict[str, torch.Tensor]
Buckets = list[list[tuple[str, torch.Tensor]]]
"""Names and tensors in the order of arrival, bucket by bucket."""

SHORT_SECONDS = 0.1
"""Deadline of an update that has to miss its deadline."""

ODD: tuple[tuple[tuple[int, ...], str], ...] = (
    ((64, 32), "float32"),
    ((), "float32"),
    ((0, 7), "bfloat16"),
    ((33,), "bfloat16"),
    ((5, 3), "float16"),
    ((1000,), "float64"),
    *(((17,), dtype) for dtype in DTYPE_BYTES),
    ((), "bool"),
    ((1, 1, 3), "int64"),
)
"""Every dtype, and shapes that a careless copy would get wrong."""


@dataclass(frozen=True, slots=True)
class Link:
    """Connects senders and receivers of the transport under test.

    Attributes:
        record: the transport.
        receivers: number of rollout replicas.
        seconds: deadline of an update that has to succeed, and of calls that have to end at once.
    """

    record: Transport
    receivers: int
    seconds: float

    def connect(self, weights: Mapping[str, torch.Tensor], bucket_bytes: int = 1024) -> OpenLink:
        """Connect senders and receivers, with a plan for weights of these shapes. Returns a context manager."""
        return OpenLink(self, announced(weights), self.senders, bucket_bytes)

    def transport(self) -> WeightTransport:
        """Return a new object of the transport."""
        transport: WeightTransport = resolve(self.record.transport)()
        return transport

    @property
    def unhurried(self) -> float:
        """A long deadline for calls that must fail at once, so that a missed deadline is not taken for the expected
        failure."""
        return self.seconds * 10

    @property
    def senders(self) -> int:
        """Number of training ranks that send. A transport within one process has one sender for each replica."""
        return self.receivers if self.record.capabilities == {capabilities.SAME_PROCESS} else 1


class OpenLink:
    """Connected senders and receivers of a transport. Each send and receive runs on its own thread."""

    def __init__(self, link: Link, parameters: Sequence[ParamMeta], ranks: int, bucket_bytes: int):
        transport = link.transport()
        self.seconds = link.seconds
        self.plan: TransferPlan = transport.prepare(parameters, link.receivers, uuid.uuid4().hex, bucket_bytes, ranks)
        self.senders = [transport.connect(self.plan, "send", index) for index in range(ranks)]
        reached = self.plan.reached(address_of(sender, "127.0.0.1") for sender in self.senders)
        self.receivers = [transport.connect(reached, "recv", index) for index in range(link.receivers)]
        self.threads = ThreadPoolExecutor(ranks + link.receivers)

    def __enter__(self) -> OpenLink:
        return self

    def __exit__(self, *error: object) -> None:
        for session in [*self.receivers, *self.senders]:
            session.close()
        self.threads.shutdown()

    def send(
        self, version: int, weights: Iterable[tuple[str, torch.Tensor]], seconds: float | None = None
    ) -> list[Future[dict[str, str]]]:
        """Begin to send on every sender."""
        items = list(weights)
        return [self.threads.submit(end.send, version, iter(items), seconds or self.seconds) for end in self.senders]

    def send_held(self, version: int, weights: Weights) -> list[Future[dict[str, str]]]:
        """Begin to send on every training rank: the rank's parts or whole weights, as the transport requires."""
        return [
            self.threads.submit(
                end.send, version, weights_for(end, HeldWeights(self.plan, rank, weights)), self.seconds
            )
            for rank, end in enumerate(self.senders)
        ]

    def receive(self, version: int, seconds: float | None = None) -> list[Future[Buckets]]:
        """Begin to receive on every receiver."""
        return [self.threads.submit(receive, end, version, seconds or self.seconds) for end in self.receivers]

    def update(self, version: int, weights: Weights) -> tuple[list[Buckets], dict[str, str]]:
        """Make a whole update. Return what each receiver got, and the first sender's checksums."""
        sending, receiving = self.send(version, weights.items()), self.receive(version)
        arrived = [future.result(self.seconds) for future in receiving]
        sums = [future.result(self.seconds) for future in sending]
        return arrived, sums[0]


@dataclass(frozen=True, slots=True)
class HeldWeights:
    """Made-up weights as one training rank holds them. Implements `WeightSource`."""

    plan: TransferPlan
    rank: int
    weights: Weights

    def metadata(self) -> list[ParamMeta]:
        """Return the plan's metadata."""
        return list(self.plan.parameters)

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the whole weights."""
        return iter(self.weights.items())

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield this rank's parts."""
        for parameter, region in parts_of(self.plan.parameters, self.rank):
            yield parameter.name, self.weights[parameter.name][as_slices(region)]


def receive(session: TransportSession, version: int, seconds: float) -> Buckets:
    """Return copies of the received tensors. Raises `WeightSyncError` if the transport gives wrong checksums."""
    return receive_with_sums(session, version, seconds)[0]


def receive_with_sums(session: TransportSession, version: int, seconds: float) -> tuple[Buckets, dict[str, str]]:
    """Return copies of the received tensors, bucket by bucket, and the checksums of the parts that arrived. Raises
    `WeightSyncError` if the transport gives other checksums."""
    buckets: Buckets = []
    sums: dict[str, str] = {}
    for chunk in session.recv(version, seconds):
        buckets.append([(name, tensor.clone()) for name, tensor in chunk.tensors])
        for name, tensor in chunk.tensors:
            parts = {part: checksum(view) for part, view in chunk.parts.get(name, [(name, tensor)])}
            for part, total in (parts | {name: checksum(tensor)}).items():
                if chunk.checksums.get(part, total) != total:
                    raise WeightSyncError(f"the transport gave a wrong checksum for {part}", [name])
            sums |= parts
    return buckets, sums


def announced(weights: Mapping[str, torch.Tensor]) -> list[ParamMeta]:
    """Return the metadata with which a training engine announces weights."""
    return [ParamMeta.of(name, t) for name, t in weights.items()]


def random_weights(seed: int, shapes: Sequence[tuple[tuple[int, ...], str]] = ODD) -> Weights:
    """Return tensors of random bytes in the given shapes and dtypes, NaNs included."""
    generator = torch.Generator().manual_seed(seed)

    def draw(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        count = math.prod(shape) * DTYPE_BYTES[dtype]
        flat = torch.randint(0, 2 if dtype == "bool" else 256, (count,), dtype=torch.uint8, generator=generator)
        return flat.view(getattr(torch, dtype)).reshape(shape)

    return {f"p{number}": draw(shape, dtype) for number, (shape, dtype) in enumerate(shapes)}


def bits(tensor: torch.Tensor) -> Any:
    """Return a tensor's dtype, shape and bytes, so that NaNs compare by their bits."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return tensor.dtype, tuple(tensor.shape), flat.numpy().tobytes()


def left_over(session: str) -> list[str]:
    """Return a session's names in this host's shared memory, which `close` should have removed."""
    from enginehouse.weights.transports.shared_segment import SharedSegment

    shared = Path("/dev/shm")
    if not shared.is_dir():
        return []
    names = [path.name for path in shared.iterdir()]
    return [name for name in names if session[:12] in name or name == SharedSegment.name_of(session)]
