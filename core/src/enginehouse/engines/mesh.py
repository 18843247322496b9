"""A mesh: named parallel axes and the place of one rank on them.

The controller dispatches by data axes and collects from output ranks, and knows nothing else of an engine's
parallelism. A mesh is plain data that crosses processes and runtimes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

DATA_AXES = ("dp", "dp_replicate", "dp_shard")
"""Axes that split the rows of a batch. Every other axis splits the model or the sequence."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """Named axes, outermost first, and this rank's coordinate on each.

    Attributes:
        axes: `(name, size)` pairs. The last axis varies fastest with the rank.
        coordinates: this rank's index on each axis, in the order of `axes`.
        output_coordinates: `(axis, coordinate)` pairs of the rank that returns results, for model axes where the
            coordinate is not 0. An engine with a pipeline gives `(("pp", last_stage),)`.

    >>> Mesh.of({"dp": 2, "tp": 2}, rank=3)
    Mesh(axes=(('dp', 2), ('tp', 2)), coordinates=(1, 1), output_coordinates=())
    >>> Mesh.of({"dp": 2, "tp": 2}, rank=2).is_output_rank
    True
    """

    axes: tuple[tuple[str, int], ...]
    coordinates: tuple[int, ...]
    output_coordinates: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, sizes: Mapping[str, int], rank: int, output: Mapping[str, int] | None = None) -> Mesh:
        """Build the mesh of `rank` from axis sizes, outermost first.

        Raises:
            ValueError: if a size is not positive, or `rank` is out of range.
        """
        world_size = math.prod(sizes.values())
        if any(size < 1 for size in sizes.values()) or not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is out of range: a mesh of {dict(sizes)} has {world_size} ranks")
        coordinates = []
        for size in reversed(list(sizes.values())):
            rank, coordinate = divmod(rank, size)
            coordinates.append(coordinate)
        return cls(tuple(sizes.items()), tuple(reversed(coordinates)), tuple((output or {}).items()))

    @property
    def world_size(self) -> int:
        """Number of ranks on the mesh."""
        return math.prod(size for _, size in self.axes)

    @property
    def rank(self) -> int:
        """Number of this rank. The last axis varies fastest."""
        rank = 0
        for (_, size), coordinate in zip(self.axes, self.coordinates, strict=True):
            rank = rank * size + coordinate
        return rank

    def size(self, axis: str) -> int:
        """Return the size of `axis`, or 1 if the mesh does not have it."""
        return dict(self.axes).get(axis, 1)

    def coordinate(self, axis: str) -> int:
        """Return this rank's coordinate on `axis`, or 0 if the mesh does not have it."""
        return {name: c for (name, _), c in zip(self.axes, self.coordinates, strict=True)}.get(axis, 0)

    @property
    def dp_size(self) -> int:
        """Number of data-parallel shards: the product of the data axes."""
        return math.prod(size for name, size in self.axes if name in DATA_AXES)

    @property
    def dp_rank(self) -> int:
        """Index of the data-parallel shard of this rank, in `range(dp_size)`."""
        rank = 0
        for (name, size), coordinate in zip(self.axes, self.coordinates, strict=True):
            if name in DATA_AXES:
                rank = rank * size + coordinate
        return rank

    @property
    def is_output_rank(self) -> bool:
        """True if this rank returns the results of its data shard. Each shard has exactly one such rank."""
        output = dict(self.output_coordinates)
        model_axes = [name for name, _ in self.axes if name not in DATA_AXES]
        return all(self.coordinate(name) == output.get(name, 0) for name in {*model_axes, *output})
