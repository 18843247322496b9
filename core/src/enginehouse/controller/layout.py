"""Assigns data shards to ranks, and chooses the rank that returns the results of each shard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from enginehouse.controller.errors import DispatchError
from enginehouse.engines.mesh import Mesh


@dataclass(frozen=True, slots=True)
class DataLayout:
    """The assignment of data shards to the ranks of a group.

    Attributes:
        shards: number of data shards.
        shard_of: shard of each rank.
        output_ranks: rank that returns the results of each shard.
    """

    shards: int
    shard_of: tuple[int, ...]
    output_ranks: tuple[int, ...]

    @classmethod
    def of(cls, meshes: Sequence[Mesh | None], group: str = "workers") -> DataLayout:
        """Return the layout of a group whose ranks have these meshes. Without meshes every rank is a shard. Raises
        `DispatchError` if the meshes do not describe one group: a mesh is missing, axes differ, or a shard has no
        output rank or several."""
        if all(mesh is None for mesh in meshes):
            ranks = tuple(range(len(meshes)))
            return cls(len(ranks), ranks, ranks)
        shard_of: list[int] = []
        output: dict[int, int] = {}
        shards = 0
        axes: tuple[tuple[str, int], ...] = ()
        for rank, mesh in enumerate(meshes):
            if mesh is None:
                raise DispatchError(f"{group}: rank {rank} has no mesh, but other ranks have a mesh")
            if mesh.world_size != len(meshes) or mesh.rank != rank:
                raise DispatchError(
                    f"{group}: the mesh of rank {rank} says rank {mesh.rank} of {mesh.world_size}, "
                    f"but the group has {len(meshes)} ranks"
                )
            axes = axes or mesh.axes
            if mesh.axes != axes:
                raise DispatchError(
                    f"{group}: rank {rank} has the mesh axes {dict(mesh.axes)}, but rank 0 has {dict(axes)}; "
                    "all ranks must declare the same axes in the same order"
                )
            shards = mesh.dp_size
            shard_of.append(mesh.dp_rank)
            if mesh.is_output_rank:
                if mesh.dp_rank in output:
                    raise DispatchError(
                        f"{group}: ranks {output[mesh.dp_rank]} and {rank} both return data shard {mesh.dp_rank}"
                    )
                output[mesh.dp_rank] = rank
        if silent := [shard for shard in range(shards) if shard not in output]:
            raise DispatchError(f"{group}: no rank returns data shard(s) {silent}; see Mesh.output_coordinates")
        return cls(shards, tuple(shard_of), tuple(output[shard] for shard in range(shards)))
