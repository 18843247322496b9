"""How a parameter of megatron-core is made of tensors of a Hugging Face checkpoint.

megatron-core puts together what is multiplied with the same input: gate and up projections; queries, keys and values.
Tensor parallelism then splits the parameter so that a rank's part is made of the same ranks' parts of the stored
tensors, each split by plain blocks. So a form is two functions between a rank's own parts, and nothing communicates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class Heads:
    """Sizes of the attention.

    Attributes:
        queries: query heads that share one key-value head.
        size: of a head.
    """

    queries: int
    size: int


class Form(Protocol):
    """How one parameter is made of stored tensors.

    Attributes:
        stored: their names, `{layer}` for the number of the layer, from 0.
        split: by which dimension tensor parallelism splits each of them; None: every rank has the whole.
    """

    stored: tuple[str, ...]
    split: int | None

    def together(self, parts: Sequence[torch.Tensor], heads: Heads) -> torch.Tensor:
        """A rank's part of the parameter, from its parts of the stored tensors."""
        ...

    def apart(self, own: torch.Tensor, heads: Heads) -> list[torch.Tensor]:
        """The other way round."""
        ...


@dataclass(frozen=True, slots=True)
class Whole:
    """A parameter that is stored as it is."""

    name: str
    split: int | None

    @property
    def stored(self) -> tuple[str, ...]:
        """See `Form`."""
        return (self.name,)

    def together(self, parts: Sequence[torch.Tensor], heads: Heads) -> torch.Tensor:
        """See `Form`."""
        return parts[0]

    def apart(self, own: torch.Tensor, heads: Heads) -> list[torch.Tensor]:
        """See `Form`."""
        return [own]


@dataclass(frozen=True, slots=True)
class Stacked:
    """Tensors of one shape, one under another: the gate projection and the up projection."""

    stored: tuple[str, ...]
    split: int | None = 0

    def together(self, parts: Sequence[torch.Tensor], heads: Heads) -> torch.Tensor:
        """See `Form`."""
        return torch.cat(list(parts))

    def apart(self, own: torch.Tensor, heads: Heads) -> list[torch.Tensor]:
        """See `Form`."""
        return list(own.chunk(len(self.stored)))


@dataclass(frozen=True, slots=True)
class Grouped:
    """Queries, keys and values: for each key-value head the rows of its queries, then its keys', then its values'."""

    stored: tuple[str, ...]
    split: int | None = 0

    def together(self, parts: Sequence[torch.Tensor], heads: Heads) -> torch.Tensor:
        """See `Form`."""
        queries, keys, values = (
            part.unflatten(0, (-1, count * heads.size))
            for part, count in zip(parts, (heads.queries, 1, 1), strict=True)
        )
        return torch.cat([queries, keys, values], dim=1).flatten(0, 1)

    def apart(self, own: torch.Tensor, heads: Heads) -> list[torch.Tensor]:
        """See `Form`."""
        rows = [heads.queries * heads.size, heads.size, heads.size]
        groups = own.unflatten(0, (-1, sum(rows)))
        return [part.flatten(0, 1) for part in groups.split(rows, dim=1)]
