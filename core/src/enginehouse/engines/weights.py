"""Weights on their way from training ranks to rollout replicas: metadata, chunks, transports, checksums.

A transport moves bytes and decides nothing. The controller owns the one state machine for all of them
(`enginehouse.weights.sync`), and compares checksums (`enginehouse.weights.checksums`) taken where parameters leave and
where they arrive.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from enginehouse.errors import EnginehouseError

if TYPE_CHECKING:
    import torch


DTYPE_BYTES = {
    "float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
"""Bytes of one element of each dtype a weight may have, by torch's name without the `torch.` prefix."""


LOOPBACK = "127.0.0.1"
"""Where what need not be reached from another host waits for connections."""

ALIGNMENT = 64
"""Each parameter begins at a multiple of this many bytes in a bucket: a cache line, and enough for every dtype."""


class WeightSyncError(EnginehouseError):
    """A weight update that did not arrive whole. The rollout replicas still serve the version they had.

    Attributes:
        parameters: names of the parameters concerned, where known.
    """

    def __init__(self, message: str, parameters: Sequence[str] = ()):
        super().__init__(message)
        self.parameters = tuple(parameters)

    def __reduce__(self):
        return type(self), (str(self), self.parameters)


class WeightUpdateAborted(WeightSyncError):
    """A side of an update was told to give up, or the other side is gone: the cause is another error, elsewhere."""


@dataclass(frozen=True, slots=True)
class ParamMeta:
    """One parameter as a side of an update holds it.

    `owners` lie on the mesh row by row, the last axis quickest. The axes split the parameter one after another, each
    what those before it left of a dimension: n indices over an axis of size k make blocks of ceil(n / k), of which the
    last may be smaller or empty (as `torch.chunk` cuts). `enginehouse.weights.parts.held_by` is this rule.

    Attributes:
        name: its Hugging Face name.
        dtype: torch dtype name, `"float32"`.
        shape: its full shape.
        owners: ranks that hold (a part of) it, each once; empty: every rank holds the whole.
        mesh_shape: sizes of the mesh axes it is placed on; empty: every owner holds the whole.
        placements: one for each mesh axis: `"R"` (replicated) or `"S0"`, `"S1"`, ... (sharded on that dimension).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    owners: tuple[int, ...] = ()
    mesh_shape: tuple[int, ...] = ()
    placements: tuple[str, ...] = ()

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> ParamMeta:
        """A parameter that every rank holds whole, as this tensor."""
        return cls(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))

    @property
    def nbytes(self) -> int:
        """Bytes of the full parameter."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def aligned_nbytes(self) -> int:
        """Bytes it takes in a bucket: `nbytes` rounded up to `ALIGNMENT`."""
        return -(-self.nbytes // ALIGNMENT) * ALIGNMENT


@runtime_checkable
class WeightSource(Protocol):
    """Read access to a training engine's current weights."""

    def metadata(self) -> list[ParamMeta]:
        """All parameters, in the order the iterators give them; the same list on every rank.

        Tied parameters appear once, under the name the Hugging Face checkpoint uses.
        """
        ...

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each whole parameter, on every rank; collective: all ranks must exhaust it together."""
        ...

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield this rank's own part of each parameter it is an owner of, in the order of `metadata`.

        Its part is the region that the metadata say (`ParamMeta`), an empty tensor where that is empty. No
        communication, but where the weights are made of several ranks' parts (adapters merged into them): so all ranks
        must exhaust it together. A tensor stays as it was yielded until the iterator's user is done with all of them:
        a transport may send it while the next is read.
        """
        ...


@runtime_checkable
class HostMemory(Protocol):
    """Memory in which an update's parameters lie, that other processes can map as well.

    Who holds it need not copy: as long as one receiver holds it, its bytes do not change. It can be held while the
    update arrives, before the next chunk is asked for, and stays held when the connection is closed. Dropping the
    object releases it too.

    Attributes:
        path: what a process of the same user on this host opens and maps, while it is held.
        offsets: the first byte of each parameter of the update in it, a multiple of `ALIGNMENT`, by name.
    """

    path: str
    offsets: Mapping[str, int]

    def hold(self) -> None:
        """Keep the bytes as they are until `release`. May be called again.

        Raises:
            WeightSyncError: too late: it was released, or a newer update has begun.
        """
        ...

    def release(self) -> None:
        """Let the bytes be overwritten; for good. May be called again, and from any thread."""
        ...


@dataclass(frozen=True, slots=True)
class WeightChunk:
    """Some parameters of an update, whole, or a receiver's parts of them where it asked for parts.

    Attributes:
        tensors: name and tensor, which may view a transport's buffer.
        checksums: `checksum` of each tensor as it arrived, where that has been taken already; else empty.
        memory: where the tensors lie, if that is memory which other processes of this host can map. An engine that
            holds it need not copy; one that does not has copied when it asks for the next chunk. Chunks of one update
            that lie in one piece of memory have one object.
        parts: of each parameter that came in parts, these: the name under which the sender's end returns the checksum
            of what left, and a view of what arrived.
    """

    tensors: Sequence[tuple[str, torch.Tensor]]
    checksums: Mapping[str, str] = field(default_factory=dict)
    memory: HostMemory | None = None
    parts: Mapping[str, Sequence[tuple[str, torch.Tensor]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ArrivedSums:
    """What arrived at a replica.

    Attributes:
        parameters: `checksum` of each parameter, by name.
        sent: `checksum` of each of the parts in which they came, by the names under which the senders return theirs;
            a parameter that came whole is a part of its own.
    """

    parameters: Mapping[str, str]
    sent: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """The announcement of an update to a rollout engine.

    Attributes:
        version: version the weights will be served as, larger than any before.
        parameters: what will arrive, in order.
    """

    version: int
    parameters: Sequence[ParamMeta]


@dataclass(frozen=True, slots=True)
class WeightState:
    """What a replica says it serves.

    Attributes:
        version: weight version; None: there are no weights, since the engine slept (`RolloutEngine.sleep`).
        checksums: `checksum` of each parameter as served, by Hugging Face name. Empty where an engine cannot
            read its weights back in that form (capability `weight_checksums` not declared).
    """

    version: int | None
    checksums: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """How an update's bytes travel; computed once from metadata, the same on every side.

    Attributes:
        transport: name of the transport.
        parameters: all parameters, in sending order.
        buckets: the parameters' indices, grouped in the order they are sent.
        bucket_bytes: size of the largest bucket, with every parameter aligned to `ALIGNMENT`.
        receivers: number of rollout replicas.
        session: names the connection; unique for a run, and the secret by which its ends know each other.
        senders: number of training ranks.
        targets: `parameters` as the receivers are to hold them, `owners` their numbers; empty: each the whole.
        bytes_moved: what an update brings to the receivers in all, in bytes; None where the transport cannot say.
        bytes_minimum: the least that could, as long as no two of them share memory; None as above.
        addresses: by training rank, where receivers connect to it, `host:port`; empty where they do not
            (`ListeningSession`).
        host: of a sender, the address at which it waits for receivers: loopback where all are on one host.
    """

    transport: str
    parameters: tuple[ParamMeta, ...]
    buckets: tuple[tuple[int, ...], ...]
    bucket_bytes: int
    receivers: int
    session: str
    senders: int = 1
    targets: tuple[ParamMeta, ...] = ()
    bytes_moved: int | None = None
    bytes_minimum: int | None = None
    addresses: tuple[str, ...] = ()
    host: str = LOOPBACK

    def reached(self, addresses: Iterable[str | None]) -> TransferPlan:
        """The plan for receivers, once the training ranks, in their order, have said where they are (`address_of`)."""
        return replace(self, addresses=tuple(address or "" for address in addresses))

    def address(self, rank: int) -> str:
        """Where receivers connect to a training rank; empty where they do not, or it has not said so."""
        return self.addresses[rank] if rank < len(self.addresses) else ""


@runtime_checkable
class TransportSession(Protocol):
    """One end of a connection, kept over many updates."""

    def send(
        self, version: int, weights: Iterable[tuple[str, torch.Tensor]], deadline_seconds: float
    ) -> dict[str, str]:
        """Send every parameter of the plan, in its order; on a rank that does not send only exhaust `weights`.

        `weights` is exhausted in every case, since giving it may be collective. Returns once every receiver took
        everything, so that the caller may change the tensors.

        Args:
            version: larger than that of any update before, whole or aborted.
            weights: name and tensor, on any device: what `enginehouse.weights.transports.ends.weights_for`
                takes of the training engine.
            deadline_seconds: for the update as a whole.

        Returns:
            The checksum of each parameter as it was before it left; of each part, where the plan has parameters leave
            in parts (`part_name`). Empty on a rank that does not send. What two ranks send under one name is the same.

        Raises:
            WeightSyncError: a receiver did not take a bucket within the deadline, the update was aborted, or
                `weights` are not those of the plan.
        """
        ...

    def recv(self, version: int, deadline_seconds: float) -> Iterator[WeightChunk]:
        """Yield what arrives for `version` until the sender's end; a chunk is valid until the next is asked for, or for
        as long as its `memory` is held.

        A chunk is a bucket of the plan. Asking for the next tells the sender that the last one was taken.

        Raises:
            WeightSyncError: not all arrived within the deadline, what arrived is of another version or another
                bucket than the next, or the update was aborted.
        """
        ...

    def abort(self, version: int) -> None:
        """Make the update to `version` fail, whether it has begun on this side or not; later versions are untouched.

        What is under way raises `WeightUpdateAborted`. Called from another thread than the one in `send` or `recv`.
        Where the transport can, the other side's update fails as well; the controller aborts both sides in any case.
        """
        ...

    def close(self) -> None:
        """Release buffers. The sender's end removes what both ends shared."""
        ...


@runtime_checkable
class ListeningSession(Protocol):
    """A sender's end to which receivers connect: a transport's own choice.

    Attributes:
        port: on which it waits for them, at the plan's `host`.
    """

    port: int


@runtime_checkable
class PartsSession(Protocol):
    """A sender's end on a training rank that sends what it holds itself: a transport's own choice.

    Attributes:
        sends_parts: whether `send` takes the rank's own parts (`WeightSource.iter_local`), on every rank.
    """

    sends_parts: bool


@runtime_checkable
class WeightTransport(Protocol):
    """A way to move weights from a train mesh to rollout replicas."""

    def prepare(
        self, parameters: Sequence[ParamMeta], receivers: int, session: str, bucket_bytes: int, senders: int = 1
    ) -> TransferPlan:
        """Plan the transfer from metadata alone; pure.

        Args:
            parameters: as the training ranks hold them.
            receivers: number of rollout replicas.
            session: names the connection.
            bucket_bytes: most bytes to travel at once, but for larger parameters.
            senders: number of training ranks.

        Raises:
            WeightSyncError: the metadata contradict themselves.
        """
        ...

    def connect(self, plan: TransferPlan, side: str, index: int) -> TransportSession:
        """Open one end: `side` `"send"` with the training rank, or `"recv"` with the replica's number.

        All senders are connected before the first receiver, whose plan says where these are.

        Raises:
            WeightSyncError: the other end cannot be reached from this process.
        """
        ...


if not TYPE_CHECKING:

    def __getattr__(name: str):
        from enginehouse.plugin.moved import resolve_old_address  # not light enough for whoever imports engines

        return resolve_old_address(__name__, name)
