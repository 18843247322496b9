"""The ranks of one role: their device, their process group, and running an action on one of them."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil
import torch
import torch.distributed as dist

from enginehouse.errors import EnginehouseError

if TYPE_CHECKING:
    from enginehouse.engines.model import ProcessContext


__all__ = ["Ranks", "device_of"]


def device_of(context: ProcessContext) -> torch.device:
    """Return the process's device, and make it the current one if it is a CUDA device."""
    if context.device == "cpu":
        return torch.device("cpu")
    index = 0 if torch.cuda.device_count() == 1 else context.local_rank
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


@dataclass(slots=True)
class Ranks:
    """This process among the ranks of its role.

    Attributes:
        rank: this process's number.
        world_size: number of processes; with 1 there is no process group and nothing communicates.
        owns_group: True if `leave` ends the process group; False if another role of this process made it.
    """

    rank: int
    world_size: int
    owns_group: bool

    @classmethod
    def join(cls, context: ProcessContext, *, alone: bool = False) -> Ranks:
        """Join the group of `context`, or use the group that another role of this process has joined.

        Args:
            context: this process's place.
            alone: create a process group for a single rank too, for an engine that always communicates.

        Raises:
            EnginehouseError: this process is in a group of another size.
        """
        if context.world_size == 1 and not alone:
            return cls(0, 1, owns_group=False)
        if dist.is_initialized():
            if (dist.get_rank(), dist.get_world_size()) != (context.rank, context.world_size):
                raise EnginehouseError(
                    f"{context}: this process is already rank {dist.get_rank()}/{dist.get_world_size()} of a process "
                    "group; roles that share processes must have the same number of ranks"
                )
            return cls(context.rank, context.world_size, owns_group=False)
        backend = "cpu:gloo,cuda:nccl" if context.device == "cuda" else "gloo"
        if context.world_size == 1:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        else:
            if interface := find_interface(context.node):
                # By default gloo uses the address of the host's name, which on Debian is loopback.
                os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            dist.init_process_group(backend)
        return cls(context.rank, context.world_size, owns_group=True)

    def broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
        """Overwrite `tensors` with the tensors of rank 0; collective."""
        if self.world_size > 1:
            with torch.no_grad():
                for tensor in tensors:
                    dist.broadcast(tensor, src=0)

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's `value`, in rank order, on every rank, as the function `gather` does. Collective."""
        return [value] if self.world_size == 1 else gather(value)

    def largest(self, number: int) -> int:
        """Return the largest of all ranks' numbers; collective."""
        if self.world_size == 1:
            return number
        most = torch.tensor(number)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return int(most)

    def on_rank_zero(self, action: Callable[[], None]) -> None:
        """Run `action` on rank 0 while the other ranks wait; if it fails, every rank raises. Collective.

        Raises:
            EnginehouseError: raised on the other ranks if `action` failed on rank 0, which raises its own exception.
        """
        failure: Exception | None = None
        if self.rank == 0:
            try:
                action()
            except Exception as error:
                failure = error
        message = self.gather(None if failure is None else f"{type(failure).__name__}: {failure}")[0]
        if failure is not None:
            raise failure
        if message is not None:
            raise EnginehouseError(f"failed on rank 0: {message}")

    @contextmanager
    def left_if_alone(self) -> Iterator[None]:
        """Leave the group if the block fails, for example a setup, so that a later role of this process can create one.

        Does nothing if there are several ranks: other ranks may wait in a collective, which fails only when this
        process ends.
        """
        try:
            yield
        except BaseException:
            if self.world_size == 1:
                self.leave()
            raise

    def leave(self) -> None:
        """End the process group if this object created it, and all groups made of its ranks."""
        if self.owns_group and dist.is_initialized():
            dist.destroy_process_group()
            # Reference cycles may still hold groups. Gloo's threads, three a group, live as long as their group and
            # spin on the connections that other ranks have closed.
            gc.collect()
        self.owns_group = False


def find_interface(address: str) -> str | None:
    """Return the network interface of this host that has an address; None if no interface has it, for example because
    the address is a host name."""
    for interface, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in addresses):
            return interface
    return None


def gather(value: Any) -> list[Any]:
    """Return the `value` of every rank of the default process group, in rank order, on every rank; collective.

    Args:
        value: a JSON value. torch's own `all_gather_object` unpickles data from other hosts, which may run any code.
    """
    text = torch.frombuffer(bytearray(json.dumps(value), "utf-8"), dtype=torch.uint8)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, torch.tensor([len(text)]))
    room = torch.zeros(int(max(lengths)), dtype=torch.uint8)
    room[: len(text)] = text
    gathered = [torch.empty_like(room) for _ in lengths]
    dist.all_gather(gathered, room)
    return [json.loads(bytes(data[: int(length)].numpy())) for data, length in zip(gathered, lengths, strict=True)]
