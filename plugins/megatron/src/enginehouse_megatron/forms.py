"""Forms: how the tensors of a Hugging Face checkpoint make up a parameter of megatron-core.

megatron-core joins tensors that are multiplied with the same input: gate and up projections; queries, keys and values.
Tensor parallelism splits stored tensors into plain blocks, and joins a rank's blocks to its part of the parameter. A
form therefore has two functions, which convert a rank's own parts in both directions without communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class Heads:
    """Sizes of the attention: `queries` per key-value head, and the `size` of a head."""

    queries: int
    size: int


class Form(Protocol):
    """Converts between one parameter and its stored tensors.

    Attributes:
        stored: Names of the tensors, with `{layer}` for the number of the layer, from 0.
        split: Dimension by which tensor parallelism splits each stored tensor; None: every rank has the whole tensor.
    """

    stored: tuple[str, ...]
    split: int | None

    def join(self, parts: Sequence[torch.Tensor], heads: Heads) -> torch.Tensor:
        """Return a rank's part of the parameter, from its parts of the stored tensors."""
        ...

    def separate(self, own: torch.Tensor, heads: Heads) -> list[torch.Tensor]:
        """Return a rank's parts of the stored tensors, from its part of the parameter."""
        ...


@dataclass(frozen=True, slots=True)
class Whole:
    """A parameter that is stored as it is."""

    name: str
    split: int | None

    @property
    def stored(self) -> tuple[str, ...]:
        return (self.name,)

    def join(self, parts: Sequence[torch.Tensor], heads: Heads) -> torch.Tensor:
        return parts[0]

    def separate(self, own: torch.Tensor, heads: Heads) -> list[torch.Tensor]:
        return [own]


@dataclass(frozen=True, slots=True)
class Stacked:
    """Tensors of one shape, stacked: the gate projection and the up projection."""

    stored: tuple[str, ...]
    split: int | None = 0

    def join(self, parts: Sequence[torch.Tensor], heads: Heads) -> torch.Tensor:
        return torch.cat(list(parts))

    def separate(self, own: torch.Tensor, heads: Heads) -> list[torch.Tensor]:
        return list(own.chunk(len(self.stored)))


@dataclass(frozen=True, slots=True)
class Grouped:
    """Queries, keys and values: for each key-value head the rows of its queries, its keys and its values."""

    stored: tuple[str, ...]
    split: int | None = 0

    def join(self, parts: Sequence[torch.Tensor], heads: Heads) -> torch.Tensor:
        queries, keys, values = (
            part.unflatten(0, (-1, count * heads.size))
            for part, count in zip(parts, (heads.queries, 1, 1), strict=True)
        )
        return torch.cat([queries, keys, values], dim=1).flatten(0, 1)

    def separate(self, own: torch.Tensor, heads: Heads) -> list[torch.Tensor]:
        rows = [heads.queries * heads.size, heads.size, heads.size]
        groups = own.unflatten(0, (-1, sum(rows)))
        return [part.flatten(0, 1) for part in groups.split(rows, dim=1)]
