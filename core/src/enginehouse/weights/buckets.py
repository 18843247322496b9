"""Plans a transfer, packs its buckets, and checks the order of a sender's weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from enginehouse.engines.weights import ParamMeta, TransferPlan, WeightSyncError

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

AHEAD = 2
"""Number of buckets in transfer to a receiver: one is in use while the next arrives."""

BUCKET_BYTES = 64 << 20
"""Usual size limit of a bucket, so large that the fixed cost of a bucket does not matter."""


def plan_transfer(
    transport: str, parameters: Sequence[ParamMeta], receivers: int, session: str, bucket_bytes: int, senders: int = 1
) -> TransferPlan:
    """Plan a transfer in buckets of whole parameters, each of at most `bucket_bytes` unless a parameter is larger."""
    buckets = pack_buckets(parameters, bucket_bytes)
    return TransferPlan(
        transport=transport,
        parameters=tuple(parameters),
        buckets=buckets,
        bucket_bytes=max((sum(parameters[i].aligned_nbytes for i in bucket) for bucket in buckets), default=0),
        receivers=receivers,
        session=session,
        senders=senders,
    )


def pack_buckets(parameters: Sequence[ParamMeta], bucket_bytes: int) -> tuple[tuple[int, ...], ...]:
    """Group parameters, in order, into buckets of at most `bucket_bytes` aligned bytes. A larger parameter gets its own
    bucket."""
    indices = range(len(parameters))
    return tuple(map(tuple, group_by_bytes(indices, lambda index: parameters[index].aligned_nbytes, bucket_bytes)))


def group_by_bytes(items: Iterable[T], nbytes: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Yield items in their order, in groups of at most `limit` bytes. A larger item gets its own group."""
    group: list[T] = []
    size = 0
    for item in items:
        if group and size + nbytes(item) > limit:
            yield group
            group, size = [], 0
        group.append(item)
        size += nbytes(item)
    if group:
        yield group


def parameters_of(plan: TransferPlan, bucket: int) -> list[ParamMeta]:
    return [plan.parameters[index] for index in plan.buckets[bucket]]


def view_parameters(
    parameters: Iterable[ParamMeta], offsets: Mapping[str, int], memory: torch.Tensor
) -> list[tuple[ParamMeta, torch.Tensor]]:
    """Return each parameter with a tensor that views the bytes `memory` at the parameter's offset."""
    import torch

    views = []
    for parameter in parameters:
        span = memory[offsets[parameter.name] :][: parameter.nbytes]
        views.append((parameter, span.view(getattr(torch, parameter.dtype)).view(parameter.shape)))
    return views


def in_plan_order(
    plan: TransferPlan, weights: Iterator[tuple[str, torch.Tensor]]
) -> Iterator[tuple[ParamMeta, torch.Tensor]]:
    """Yield the whole parameters of `weights` with their metadata, and check that they come in the plan's order.

    Raises:
        WeightSyncError: if a name, shape or dtype differs from the plan, or parameters are missing or surplus.
    """
    for (parameter, _), tensor in check_announced(((entry, entry.shape) for entry in plan.parameters), weights):
        yield parameter, tensor


def check_announced(
    expected: Iterable[tuple[ParamMeta, tuple[int, ...]]], weights: Iterator[tuple[str, torch.Tensor]]
) -> Iterator[tuple[tuple[ParamMeta, tuple[int, ...]], torch.Tensor]]:
    """Yield each tensor of `weights` with the entry of `expected` that announces it. Raises `WeightSyncError` if a
    name, shape or dtype differs, or parameters are missing or surplus."""
    for parameter, shape in expected:
        name, tensor = next(weights, (None, None))
        if name is None or tensor is None:
            raise WeightSyncError(
                f"the training engine's weights ended before {parameter.name!r}, which its metadata announce",
                [parameter.name],
            )
        dtype = str(tensor.dtype).removeprefix("torch.")
        if (name, dtype, tuple(tensor.shape)) != (parameter.name, parameter.dtype, shape):
            raise WeightSyncError(
                f"the training engine gave {name!r} ({dtype}, shape {tuple(tensor.shape)}) where its metadata announce "
                f"{parameter.name!r} ({parameter.dtype}, shape {shape})",
                [parameter.name],
            )
        yield (parameter, shape), tensor
    extra = next(weights, None)
    if extra is not None:
        raise WeightSyncError(f"the training engine gave {extra[0]!r}, which its metadata do not announce", [extra[0]])


@contextmanager
def drain(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
    """Yield an iterator over `weights`, and exhaust it at the end of the block, even after an error, because other
    ranks may gather the parameters together with this rank."""
    iterator = iter(weights)
    try:
        yield iterator
    finally:
        for _ in iterator:
            pass
