"""Weights on their way from training ranks to rollout replicas: metadata, chunks and transports.

A transport only moves bytes. The controller's one state machine (`enginehouse.weights.sync`) makes all decisions, and
compares checksums (`enginehouse.weights.checksums`) taken where parameters leave and where they arrive.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from enginehouse.errors import EnginehouseError

if TYPE_CHECKING:
    import torch


DTYPE_BYTES = {
    "float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
"""Bytes per element of each dtype that a weight may have, by torch's name without the `torch.` prefix."""


LOOPBACK = "127.0.0.1"
"""Address to listen on if no other host needs to connect."""

ALIGNMENT = 64
"""Each parameter begins at a multiple of this many bytes in a bucket: a cache line, and enough for every dtype."""


class WeightSyncError(EnginehouseError):
    """A weight update did not arrive completely. The rollout replicas still serve their former version.

    Attributes:
        parameters: names of the parameters concerned, if known.
    """

    def __init__(self, message: str, parameters: Sequence[str] = ()):
        super().__init__(message)
        self.parameters = tuple(parameters)

    def __reduce__(self):
        return type(self), (str(self), self.parameters)


class WeightUpdateAborted(WeightSyncError):
    """A side of an update was aborted, or the other side has died. The cause is another error elsewhere."""


class LoanOver(WeightSyncError):
    """The trainer may have changed the weights that it lent to a replica, so the replica must not compute with them."""


@dataclass(frozen=True, slots=True)
class ParamMeta:
    """One parameter as one side of an update holds it.

    `owners` are on the mesh in row-major order. The axes split the parameter one after another. If earlier axes have
    left n indices of a dimension, an axis of size k splits them into blocks of ceil(n / k). The last blocks may be
    smaller or empty, as with `torch.chunk`. `enginehouse.weights.parts.held_by` implements this rule.

    Attributes:
        name: Hugging Face name of the parameter.
        dtype: torch dtype name, such as `"float32"`.
        shape: full shape.
        owners: distinct ranks that hold the parameter or a part of it. Empty: every rank holds the whole parameter.
        mesh_shape: sizes of the mesh axes that the parameter is placed on. Empty: every owner holds the whole
            parameter.
        placements: for each mesh axis `"R"` (replicated) or `"S0"`, `"S1"`, ... (sharded on that dimension).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    owners: tuple[int, ...] = ()
    mesh_shape: tuple[int, ...] = ()
    placements: tuple[str, ...] = ()

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> ParamMeta:
        """Return the metadata of `tensor` as a parameter that every rank holds whole."""
        return cls(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))

    @property
    def nbytes(self) -> int:
        """Size of the full parameter in bytes."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def aligned_nbytes(self) -> int:
        """Size in bytes that the parameter takes in a bucket: `nbytes` rounded up to a multiple of `ALIGNMENT`."""
        return -(-self.nbytes // ALIGNMENT) * ALIGNMENT


@runtime_checkable
class WeightSource(Protocol):
    """Read access to the current weights of a training engine."""

    def metadata(self) -> list[ParamMeta]:
        """Return all parameters in the order of the iterators. The list is the same on every rank.

        Tied parameters appear once, under the name that the Hugging Face checkpoint uses.
        """
        ...

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each whole parameter on every rank. Collective: all ranks must exhaust the iterator together."""
        ...

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield this rank's part of each parameter that it owns, in the order of `metadata`.

        The part is the region that the metadata state (`ParamMeta`); an empty region gives an empty tensor. All ranks
        must exhaust the iterator together, because weights that combine several ranks' parts (merged adapters) need
        communication. A tensor must not change before the iterator is exhausted, because a transport may send it while
        it reads the next tensor.
        """
        ...


@runtime_checkable
class HostMemory(Protocol):
    """Memory that holds the parameters of an update and that other processes can map.

    A receiver that holds the memory need not copy it, because its bytes do not change until the release. A receiver
    calls `hold` during the update, before it requests the next chunk. The memory stays held when the connection is
    closed. Deleting the object also releases it.

    Attributes:
        path: file that a process of the same user on this host can open and map while the memory is held.
        offsets: first byte, by name, of each parameter of the update, a multiple of `ALIGNMENT`.
    """

    path: str
    offsets: Mapping[str, int]

    def hold(self) -> None:
        """Keep the bytes unchanged until `release`. May be called again.

        Raises:
            WeightSyncError: if the memory was released, or a newer update has begun.
        """
        ...

    def release(self) -> None:
        """Allow the bytes to be overwritten, permanently. May be called again, and from any thread."""
        ...


class Loan:
    """The right to use tensors of a training engine in place, until the trainer is about to change them.

    Computations with lent tensors run within `using`. `end` waits for a running computation, so that no computation
    ever sees weights change.

    Attributes:
        is_over: True once the trainer has ended the loan.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.is_over = False

    @contextmanager
    def using(self) -> Iterator[None]:
        """Keep the tensors unchanged within the context. Only one thread at a time may enter it.

        Raises:
            LoanOver: if the trainer has ended the loan.
        """
        with self._lock:
            self.check()
            yield

    def check(self) -> None:
        """Check that the tensors have not changed since they were lent.

        Raises:
            LoanOver: if they may have changed.
        """
        if self.is_over:
            raise LoanOver(
                "the trainer changes the weights that it has lent to this replica, so the replica cannot compute: it "
                "needs a weight update first"
            )

    def end(self) -> None:
        """Reject further use. Return once no computation uses the tensors any more. May be called again."""
        with self._lock:
            self.is_over = True


@dataclass(frozen=True, slots=True)
class WeightChunk:
    """Some parameters of an update: whole parameters, or parts of them if the receiver requested parts.

    Attributes:
        tensors: pairs of name and tensor. A tensor may be a view of a transport's buffer.
        checksums: `checksum` of each tensor and part as it arrived, if the transport has computed them from the bytes
            that the tensors view; else empty.
        memory: the memory of the tensors, if other processes of this host can map it. An engine that holds the memory
            need not copy; any other engine must copy before it requests the next chunk. Chunks of an update that are
            stored in the same memory share one object.
        parts: for each parameter that came in parts, pairs of name and view. The sender returns the checksum of the
            part under that name.
        loan: present if the tensors are the trainer's own, which stay unchanged until the loan is over. An engine may
            use them in place within `Loan.using`, or copy as usual.
    """

    tensors: Sequence[tuple[str, torch.Tensor]]
    checksums: Mapping[str, str] = field(default_factory=dict)
    memory: HostMemory | None = None
    parts: Mapping[str, Sequence[tuple[str, torch.Tensor]]] = field(default_factory=dict)
    loan: Loan | None = None


@dataclass(frozen=True, slots=True)
class ArrivedSums:
    """Checksums of the parameters that arrived at a replica.

    Attributes:
        parameters: `checksum` of each parameter by name.
        sent: `checksum` of each part by the name under which the senders return the part's checksum. A whole parameter
            is one part.
        generating: True if the replica was not paused, and generates with the old weights until the switch.
        bytes_arrived: bytes that the update sent to the replica, if its transport counts them (`CountingSession`).
    """

    parameters: Mapping[str, str]
    sent: Mapping[str, str]
    generating: bool = False
    bytes_arrived: int | None = None


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """The announcement of an update to a rollout engine.

    Attributes:
        version: version of the new weights, larger than all before.
        parameters: the parameters that will arrive, in order.
    """

    version: int
    parameters: Sequence[ParamMeta]


@dataclass(frozen=True, slots=True)
class WeightState:
    """The weights that a replica reports to serve.

    Attributes:
        version: weight version; None if there are no weights since the engine slept (`RolloutEngine.sleep`).
        checksums: `checksum` of each served parameter by Hugging Face name. Empty if the engine cannot read its weights
            back in that form. If the engine has converted a parameter, and holds exactly the converted values, this is
            the checksum from before the conversion.
        unread: names of the parameters that the engine cannot read back, although it reads others. Always empty for an
            engine with the capability `weight_checksums`.
    """

    version: int | None
    checksums: Mapping[str, str] = field(default_factory=dict)
    unread: Sequence[str] = ()

    @property
    def reads_all(self) -> bool:
        """True if all parameters were read back."""
        return bool(self.checksums) and not self.unread


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """The plan of an update's transfer. It is computed once from metadata and is the same on every side.

    Attributes:
        transport: name of the transport.
        parameters: all parameters in sending order.
        buckets: indices of the parameters in each bucket, in sending order.
        bucket_bytes: size of the largest bucket, with every parameter aligned to `ALIGNMENT`.
        receivers: number of rollout replicas.
        session: name of the connection, unique in a run, and the secret by which its sides recognise each other.
        senders: number of training ranks.
        targets: `parameters` as the receivers shall hold them, with receiver numbers as `owners`. Empty: each receiver
            holds all of them whole.
        bytes_moved: bytes that an update sends to all receivers together; None if unknown, or if updates differ.
        bytes_minimum: least possible `bytes_moved`, if no two receivers share memory; None if unknown.
        addresses: `host:port` of each training rank, to which receivers connect; empty if receivers do not connect
            (`ListeningSession`).
        host: address at which a sender listens: loopback if all processes are on one host.
        lends: True if the trainer may lend its tensors (`LendingSession`), because no replica generates while it
            trains.
        sums_in_place: True if a transport that passes references returns `mixed_checksum` for tensors, which their
            device computes. Since 1.1.
        adapter: True if `parameters` are those of an adapter (`ModelSpec.adapter`). Since 1.1.
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
    lends: bool = False
    sums_in_place: bool = False
    adapter: bool = False

    def reached(self, addresses: Iterable[str | None]) -> TransferPlan:
        """Return the plan for receivers, with the `addresses` that the training ranks report, by rank."""
        return replace(self, addresses=tuple(address or "" for address in addresses))

    def address(self, rank: int) -> str:
        """Return the address of a training rank; empty if receivers do not connect to it or it has reported none."""
        return self.addresses[rank] if rank < len(self.addresses) else ""


@runtime_checkable
class TransportSession(Protocol):
    """One side of a connection, kept over many updates."""

    def send(
        self, version: int, weights: Iterable[tuple[str, torch.Tensor]], deadline_seconds: float
    ) -> dict[str, str]:
        """Send every parameter of the plan in its order. A rank that does not send only exhausts `weights`.

        `weights` is always exhausted, because yielding them may be collective. Returns once every receiver has taken
        everything, so the caller may change the tensors.

        Args:
            version: larger than the version of any earlier update, complete or aborted.
            weights: pairs of name and tensor on any device: the part of the training engine's weights that
                `enginehouse.weights.transports.ends.weights_for` chooses.
            deadline_seconds: longest time without progress, such as a parameter that leaves.

        Returns:
            Checksum of each parameter before it left, or of each part if the plan sends parts (`part_name`). Empty on a
            rank that does not send. If two ranks send under one name, their checksums are equal.

        Raises:
            WeightSyncError: if a receiver did not take a bucket in time, the update was aborted, or `weights` do not
                match the plan.
        """
        ...

    def recv(self, version: int, deadline_seconds: float) -> Iterator[WeightChunk]:
        """Yield the chunks of `version` until the sender has sent all. A chunk is valid until the next chunk, or while
        its memory is held.

        A chunk is a bucket of the plan. Requesting the next chunk tells the sender that the last one was taken.

        Args:
            deadline_seconds: longest time without a further chunk.

        Raises:
            WeightSyncError: if a chunk did not arrive in time, a bucket has another version or is out of order, or the
                update was aborted.
        """
        ...

    def abort(self, version: int) -> None:
        """Make the update to `version` fail on this side, even before it begins. Later versions are not affected.

        A running `send` or `recv` raises `WeightUpdateAborted`. This is called from another thread. If the transport
        can, it also fails the other side; the controller aborts both sides in any case.
        """
        ...

    def close(self) -> None:
        """Release buffers. The sending side also removes what both sides shared."""
        ...


@runtime_checkable
class ListeningSession(Protocol):
    """A sending side to which receivers connect. Optional for a transport.

    Attributes:
        port: port at which it listens, on the plan's `host`.
    """

    port: int


@runtime_checkable
class LendingSession(Protocol):
    """A sending side that passes on the training engine's own tensors. Optional for a transport.

    Attributes:
        loan: the loan that every chunk of the next update carries; None if the update's weights are not lent.
    """

    loan: Loan | None


@runtime_checkable
class PartsSession(Protocol):
    """A sending side on a training rank that sends its own parts. Optional for a transport.

    Attributes:
        sends_parts: True if `send` on every rank takes the rank's own parts (`WeightSource.iter_local`).
    """

    sends_parts: bool


@runtime_checkable
class CountingSession(Protocol):
    """A receiving side that counts bytes, because no plan can tell them. Optional for a transport. Since 1.1.

    Attributes:
        bytes_arrived: bytes that the last update sent to this side.
    """

    bytes_arrived: int


@runtime_checkable
class WeightTransport(Protocol):
    """A way to move weights from training ranks to rollout replicas."""

    def prepare(
        self, parameters: Sequence[ParamMeta], receivers: int, session: str, bucket_bytes: int, senders: int = 1
    ) -> TransferPlan:
        """Plan the transfer from metadata only. Pure.

        Args:
            parameters: the parameters as the training ranks hold them.
            receivers: number of rollout replicas.
            session: name of the connection.
            bucket_bytes: maximum number of bytes to send at once, except for larger parameters.
            senders: number of training ranks.

        Raises:
            WeightSyncError: if the metadata contradict themselves.
        """
        ...

    def connect(self, plan: TransferPlan, side: str, index: int) -> TransportSession:
        """Open one side. `side` is `"send"` or `"recv"`; `index` is the training rank or the replica's number.

        All senders are connected before the first receiver. A receiver's plan has the senders' addresses.

        Raises:
            WeightSyncError: if the other side cannot be reached from this process.
        """
        ...


if not TYPE_CHECKING:

    def __getattr__(name: str):
        from enginehouse.plugin.moved import resolve_old_address  # too heavy an import for most users of this module

        return resolve_old_address(__name__, name)
