"""The layout of a model's weights in its Hugging Face checkpoint, if transformers holds them in another layout.

Experts are the main case. A checkpoint holds three matrices for each expert. The model holds one tensor with the gate
and up projections of all experts, and one with their down projections. Every stored tensor then consists of rows of one
of the model's tensors, so it can be read and written in place, as a view.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from enginehouse.errors import ModelError
from enginehouse.weights.names import match_names, unique_state

if TYPE_CHECKING:
    from transformers import PreTrainedModel


__all__ = ["StoredForm"]


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A tensor of the checkpoint as a part of one of the model's tensors.

    Attributes:
        name: its name in the checkpoint.
        entry: index of the part in the first dimension of the model's tensor; None: it is the whole tensor.
        rows: first row of the part in the second dimension, and the row after its last.
    """

    name: str
    entry: int | None = None
    rows: tuple[int, int] = (0, 0)

    def cut(self, tensor: torch.Tensor, first: int = 0) -> torch.Tensor:
        """Return this part as a view of the model's tensor.

        Args:
            tensor: the model's tensor, or some consecutive entries of it.
            first: index of the first entry of `tensor` in the whole.
        """
        return tensor if self.entry is None else tensor[self.entry - first, slice(*self.rows)]


class StoredForm:
    """The names and parts under which a checkpoint stores a model's tensors.

    Args:
        parts: parts of each tensor that is stored in another layout, by the tensor's name in the model.
    """

    def __init__(self, parts: Mapping[str, tuple[StoredPart, ...]]):
        self._parts = parts

    @classmethod
    def of(cls, model: PreTrainedModel, stored: frozenset[str]) -> StoredForm:
        """Find the stored parts by letting transformers store row numbers in place of the rows.

        Args:
            model: on any device, the meta device included, because its values are not read.
            stored: names in the checkpoint; a tensor with its own name there is stored as it is.

        Raises:
            ModelError: a stored tensor does not consist of rows of one tensor of the model.
        """
        from transformers.core_model_loading import revert_weight_conversion

        state = unique_state(model, stored)
        if set(state) <= stored:
            return cls({})
        whole = {target.name: name for name, target in match_names(model, stored).items() if target.is_whole}
        numbers: dict[str, torch.Tensor] = {}
        begin = 0
        for name, tensor in model.state_dict().items():
            if name in whole or name in stored or not tensor.dim():
                continue
            rows = tensor.shape[: max(tensor.dim() - 1, 1)]
            last = tensor.dim() - len(rows)
            # Each number twice: before 5.24 transformers drops a dimension of size 1.
            numbers[name] = (
                torch.arange(begin, begin + rows.numel()).view(*rows, *[1] * last).expand(*rows, *[2] * last)
            )
            begin += rows.numel()
        try:
            stored_rows = revert_weight_conversion(model, dict(numbers))
        except Exception as error:
            raise ModelError(
                f"{type(model).__name__} stores its weights in another layout than it holds them, and transformers "
                f"cannot convert them: {type(error).__name__}: {error}"
            ) from error
        owner = {int(rows.flatten()[0]): name for name, rows in numbers.items() if rows.numel()}
        begins = torch.tensor(sorted(owner))
        parts: dict[str, list[StoredPart]] = {}
        for stored_name, rows in stored_rows.items():
            if rows.numel():
                name = owner[int(begins[begins <= rows.flatten()[0]][-1])]
                parts.setdefault(name, []).append(_locate(model, stored_name, rows, name, numbers[name]))
        renamed = {name: (StoredPart(stored_name),) for name, stored_name in whole.items() if name != stored_name}
        return cls({name: tuple(own) for name, own in parts.items()} | renamed)

    def parts(self, name: str) -> tuple[StoredPart, ...]:
        """Return the parts in which the model's tensor `name` is stored."""
        return self._parts.get(name) or (StoredPart(name),)

    def apart(self, state: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every whole tensor of `state` under its stored names and in its stored parts: views, no copies."""
        for name, tensor in state.items():
            for part in self.parts(name):
                yield part.name, part.cut(tensor)


def _locate(model: PreTrainedModel, stored_name: str, rows: torch.Tensor, name: str, own: torch.Tensor) -> StoredPart:
    """Find the part of the model's tensor `name` that is stored as `stored_name`.

    Args:
        rows: row numbers that transformers stores under `stored_name`.
        own: row numbers that the model's tensor `name` holds.

    Raises:
        ModelError: `rows` are not consecutive rows of `own`.
    """
    if torch.equal(rows, own):
        return StoredPart(stored_name)
    if own.dim() == 3 and rows.dim() == 2:
        entry, first = divmod(int(rows.flatten()[0] - own.flatten()[0]), own.shape[1])
        part = StoredPart(stored_name, entry, (first, first + rows.shape[0]))
        if torch.equal(part.cut(own), rows):
            return part
    raise ModelError(
        f"{type(model).__name__} stores {stored_name!r} in a layout that is not supported: it must consist of rows of "
        f"the model's {name!r}"
    )
