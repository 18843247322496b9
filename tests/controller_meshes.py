"""The worker class of the tests that lay a mesh over many processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from enginehouse.controller import Worker, register
from enginehouse.engines.mesh import Mesh

if TYPE_CHECKING:
    from torch import Tensor

    from enginehouse.data import Batch


class Witness(Worker):
    """Says which rows it was given, and where they lay."""

    def lie_on(self, sizes: dict[str, int], output: dict[str, int]) -> None:
        """Take a place on a mesh, and forget what was seen on the one before."""
        self.mesh = Mesh.of(sizes, self.context.rank, output)
        self.seen: list[list[int]] = []

    @register("dp")
    def identity(self, batch: Batch):
        """The batch as it came; from a rank that is not asked for results something that fits nowhere."""
        self.seen.append(batch.tensor("number").tolist())
        dense = [name for name in ("number", "added") if name in batch]
        self.places = {name: place_in_shared_memory(batch.tensor(name)) for name in dense}
        return batch if self.mesh.is_output_rank else "nobody asked for this"

    @register("dp", collect="list")
    def answering_rank(self, batch: Batch) -> int:
        return self.context.rank

    def what_was_seen(self) -> list[list[int]]:
        return self.seen

    def where_it_lay(self, column: str) -> tuple[int, int] | None:
        return self.places[column]


def place_in_shared_memory(tensor: Tensor) -> tuple[int, int] | None:
    """Inode and offset of the shared file a tensor's memory is mapped from: the same in all processes that share it.

    None for memory of this process alone.
    """
    address = tensor.data_ptr()
    with open("/proc/self/maps") as lines:
        for line in lines:
            span, permissions, offset, _, inode, *_ = line.split()
            start, end = (int(bound, 16) for bound in span.split("-"))
            if start <= address < end:
                return (int(inode), int(offset, 16) + address - start) if permissions.endswith("s") else None
    return None
