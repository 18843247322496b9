"""The weights of a replicated model, with the names and the layout of its Hugging Face checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from enginehouse.engines.weights import ParamMeta
from enginehouse.weights.names import unique_state

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from enginehouse_torch.modeling.stored import StoredForm


class ReplicatedWeights:
    """The `WeightSource` of a model that every rank holds whole.

    The tensors are the model's own tensors, detached. The next optimizer step changes them, so a reader that keeps them
    longer must copy them. If a tied parameter has several names, the checkpoint's `stored` names decide which name it
    gets, and `form` is how the checkpoint stores the model.
    """

    def __init__(self, model: PreTrainedModel, stored: frozenset[str], form: StoredForm):
        self._model = model
        self._stored = stored
        self._form = form

    def metadata(self) -> list[ParamMeta]:
        """Describe all parameters and persistent buffers, tied ones once."""
        return [ParamMeta.of(name, tensor) for name, tensor in self.iter_local()]

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each tensor; every rank holds all of them, so no communication is needed."""
        return self.iter_local()

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each tensor."""
        yield from self._form.apart(unique_state(self._model, self._stored))
