"""Both ends of a transport under test, in this process; and made-up weights to send."""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from enginehouse.engines.weights import DTYPE_BYTES, ParamMeta, TransferPlan, TransportSession, WeightTransport
from enginehouse.plugin import Transport, capabilities, resolve
from enginehouse.weights.parts import as_slices, parts_of
from enginehouse.weights.transports.ends import address_of, weights_for

Weights = dict[str, torch.Tensor]

SHORT_SECONDS = 0.1
"""Deadline of an update that is to miss it."""

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
"""Every dtype, and shapes a careless copy trips over."""


@dataclass(frozen=True, slots=True)
class Link:
    """What an act is given.

    Attributes:
        record: the transport under test.
        receivers: number of rollout replicas.
        seconds: deadline of an update that is to succeed, and of everything that is to end at once.
    """

    record: Transport
    receivers: int
    seconds: float

    def connect(self, weights: Mapping[str, torch.Tensor], bucket_bytes: int = 1024) -> Connection:
        """Open both ends, planned for weights of these shapes. A context manager."""
        return Connection(self, announced(weights), self.senders, bucket_bytes)

    def connect_ranks(self, parameters: Sequence[ParamMeta], ranks: int, bucket_bytes: int = 1024) -> Connection:
        """Open both ends for several training ranks, which hold the parameters as these metadata say."""
        return Connection(self, parameters, max(ranks, self.senders), bucket_bytes)

    def transport(self) -> WeightTransport:
        """A new object of the transport."""
        made: WeightTransport = resolve(self.record.transport)()
        return made

    @property
    def unhurried(self) -> float:
        """Deadline of what is to be refused before: a deadline that is missed must not be taken for the refusal."""
        return self.seconds * 10

    @property
    def senders(self) -> int:
        """Training ranks that send: where the reach is one process, each replica has one of its own."""
        return self.receivers if self.record.capabilities == {capabilities.SAME_PROCESS} else 1


class Connection:
    """Both ends of a transport, each send and receive on a thread of its own."""

    def __init__(self, link: Link, parameters: Sequence[ParamMeta], ranks: int, bucket_bytes: int):
        transport = link.transport()
        self.seconds = link.seconds
        self.plan: TransferPlan = transport.prepare(parameters, link.receivers, uuid.uuid4().hex, bucket_bytes, ranks)
        self.senders = [transport.connect(self.plan, "send", index) for index in range(ranks)]
        reached = self.plan.reached(address_of(each, "127.0.0.1") for each in self.senders)
        self.receivers = [transport.connect(reached, "recv", index) for index in range(link.receivers)]
        self.threads = ThreadPoolExecutor(ranks + link.receivers)

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for session in [*self.receivers, *self.senders]:
            session.close()
        self.threads.shutdown()

    def sending(
        self, version: int, weights: Iterable[tuple[str, torch.Tensor]], seconds: float | None = None
    ) -> list[Future[dict[str, str]]]:
        """Each sender's send, begun."""
        items = list(weights)
        return [self.threads.submit(each.send, version, iter(items), seconds or self.seconds) for each in self.senders]

    def receiving(
        self, version: int, seconds: float | None = None
    ) -> list[Future[list[list[tuple[str, torch.Tensor]]]]]:
        """Each receiver's buckets, begun to be read."""
        return [self.threads.submit(received, each, version, seconds or self.seconds) for each in self.receivers]

    def sending_held(self, version: int, weights: Weights) -> list[Future[dict[str, str]]]:
        """Each training rank's send, begun, of what it holds or of the wholes, as its end asks."""
        return [
            self.threads.submit(each.send, version, weights_for(each, Held(self.plan, rank, weights)), self.seconds)
            for rank, each in enumerate(self.senders)
        ]

    def update(
        self, version: int, weights: Weights
    ) -> tuple[list[list[list[tuple[str, torch.Tensor]]]], dict[str, str]]:
        """A whole update: what each receiver got, bucket by bucket, and the first sender's checksums."""
        sending, receiving = self.sending(version, weights.items()), self.receiving(version)
        arrived = [one.result(self.seconds) for one in receiving]
        sums = [one.result(self.seconds) for one in sending]
        return arrived, sums[0]


@dataclass(frozen=True, slots=True)
class Held:
    """Made-up weights as one training rank holds them: a `WeightSource`."""

    plan: TransferPlan
    rank: int
    weights: Weights

    def metadata(self) -> list[ParamMeta]:
        """See `WeightSource`."""
        return list(self.plan.parameters)

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `WeightSource`."""
        return iter(self.weights.items())

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `WeightSource`."""
        for parameter, region in parts_of(self.plan.parameters, self.rank):
            yield parameter.name, self.weights[parameter.name][as_slices(region)]


def received(session: TransportSession, version: int, seconds: float) -> list[list[tuple[str, torch.Tensor]]]:
    """Copies of what arrives, bucket by bucket."""
    return [[(name, t.clone()) for name, t in chunk.tensors] for chunk in session.recv(version, seconds)]


def announced(weights: Mapping[str, torch.Tensor]) -> list[ParamMeta]:
    """What a training engine says of weights."""
    return [ParamMeta.of(name, t) for name, t in weights.items()]


def random_weights(seed: int, shapes: Sequence[tuple[tuple[int, ...], str]] = ODD) -> Weights:
    """Random bytes of the given shapes and dtypes, NaNs and all."""
    generator = torch.Generator().manual_seed(seed)

    def one(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        count = math.prod(shape) * DTYPE_BYTES[dtype]
        flat = torch.randint(0, 2 if dtype == "bool" else 256, (count,), dtype=torch.uint8, generator=generator)
        return flat.view(getattr(torch, dtype)).reshape(shape)

    return {f"p{number}": one(shape, dtype) for number, (shape, dtype) in enumerate(shapes)}


def bits(tensor: torch.Tensor) -> Any:
    """A tensor's dtype, shape and bytes: NaNs compare by their bits."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return tensor.dtype, tuple(tensor.shape), flat.numpy().tobytes()


def left_over(session: str) -> list[str]:
    """Names in this host's shared memory that belong to a session: what `close` had to remove."""
    from enginehouse.weights.transports.shared_segment import SharedSegment

    shared = Path("/dev/shm")
    if not shared.is_dir():
        return []
    return [
        one.name for one in shared.iterdir() if session[:12] in one.name or one.name == SharedSegment.name_of(session)
    ]
