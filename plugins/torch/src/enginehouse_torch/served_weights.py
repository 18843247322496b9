"""The weights that a rollout engine serves: a new version is staged beside the old one, then replaces it.

A trainer in the same process may lend its own tensors. The model's parameters then are these tensors, so that the
weights exist once in memory. When the trainer ends the loan, the engine computes nothing until the next update.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from enginehouse.engines.storages import give_back_freed_memory, give_up, take_back
from enginehouse.engines.weights import HostMemory, Loan, WeightChunk, WeightState, WeightUpdate
from enginehouse.weights.checksums import checksum_like
from enginehouse.weights.form import ModelForm
from enginehouse.weights.names import stored_names, tied_names, unique_state
from enginehouse.weights.staged_update import StagedUpdate
from enginehouse_torch.modeling.offloading import storages
from enginehouse_torch.modeling.sizes import LITTLE_BYTES
from enginehouse_torch.modeling.stored import StoredForm

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class StagedTensors:
    """Tensors of a staged version `number` on the model's device, which will replace the `served` tensors.

    Attributes:
        parameters: names of the announced parameters.
        room: tensors to write to, by name; missing tensors are allocated.
        arrived: tensors that have arrived.
        sums: checksums of the tensors that have arrived, as far as the update gave them.
        loan: the trainer's loan of arrived tensors; None: all were copied.
        lent: names of the lent tensors.
    """

    def __init__(
        self,
        number: int,
        parameters: Container[str],
        served: dict[str, torch.Tensor],
        room: dict[str, torch.Tensor],
    ):
        self.number = number
        self.parameters = parameters
        self.arrived: dict[str, torch.Tensor] = {}
        self.sums: dict[str, str] = {}
        self.room = room
        self.loan: Loan | None = None
        self.lent: set[str] = set()
        self._served = served
        self._offered: Loan | None = None

    def offer(self, loan: Loan | None) -> None:
        """Note the loan of the next tensors. If it is not the loan of the first chunk, these tensors will be copied."""
        self.loan = loan if not self.arrived else self.loan
        self._offered = loan

    def take(self, name: str, tensor: torch.Tensor, arrived_sum: str | None, memory: HostMemory | None) -> None:
        """Copy a parameter's tensor to the device, unless it is lent."""
        if arrived_sum is not None:
            self.sums[name] = arrived_sum
        if self.loan is not None and self._offered is self.loan and tensor.device == self._served[name].device:
            self.lent.add(name)
            self.arrived[name] = tensor.detach()
            return
        if name not in self.room:
            self.room[name] = torch.empty_like(self._served[name])
        self.arrived[name] = self.room[name].copy_(tensor.detach())


class ServedWeights(StagedUpdate[StagedTensors]):
    """A model's parameters and persistent buffers by Hugging Face name, and their version.

    A tied parameter has only its name in the checkpoint here, so that the tie holds after every update. Only `commit`
    changes the model: it overwrites the tensors in place, or makes the lent tensors the parameters.

    Args:
        model: the model.
        path: its directory.
        where: names this replica in messages.
        rebind: called after the parameters have moved to other memory.

    Attributes:
        is_lost: True from `forget` until an update has brought new weights.
        are_large: True on a CPU for large weights, whose freed memory is worth returning to the system.
    """

    def __init__(self, model: PreTrainedModel, path: str, where: str, rebind: Callable[[], None] = lambda: None):
        super().__init__(where)
        self._model, self._rebind = model, rebind
        self._stored = stored_names(Path(path))
        self._stored_form = StoredForm.of(model, self._stored)
        self._parameters = self._find_tensors()
        self._own = self._list_parameters()
        self._form = ModelForm.of_tensors(self._parameters, tied_names(model, self._stored))
        self._on_cpu = model.device.type == "cpu"
        nbytes = sum(tensor.nbytes for tensor in self._parameters.values())
        self.are_large = self._on_cpu and nbytes > LITTLE_BYTES
        # Staging memory kept between updates on a CPU, where fresh memory is five times as slow, unless it is large.
        self._room: dict[str, torch.Tensor] = {}
        self._checksums: dict[str, str] = {}
        self._arrived_sums: dict[str, str] = {}
        self._device = model.device
        self._loan: Loan | None = None  # set while the trainer owns the parameters
        self.is_lost = False

    def _find_tensors(self) -> dict[str, torch.Tensor]:
        """Return the model's tensors in the checkpoint's layout, as views that updates write to."""
        return dict(self._stored_form.apart(unique_state(self._model, self._stored)))

    def forget(self) -> None:
        """Free the memory of the served weights. Their values are lost."""
        self.discard()
        self._leave_loan()
        self._room, self._checksums, self.is_lost = {}, {}, True
        memory = storages(self._parameters.values(), self._device).values()
        self._sizes = [(storage, storage.nbytes()) for storage in memory]
        for storage in memory:
            give_up(storage)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def make_room(self) -> None:
        """Allocate the memory again; the next update fills it."""
        for storage, nbytes in self._sizes:
            take_back(storage, nbytes)

    def using(self) -> AbstractContextManager[None]:
        """Return the context in which the engine may compute with the weights.

        Raises:
            LoanOver: on entering, if the weights were lent and the trainer has ended the loan.
        """
        return nullcontext() if self._loan is None else self._loan.using()

    def check_loan(self) -> None:
        """Check that the loan of the weights, if there is one, has not ended.

        Raises:
            LoanOver: the trainer has ended the loan.
        """
        if self._loan is not None:
            self._loan.check()

    def _model_form(self) -> ModelForm:
        return self._form

    def _begun(self, update: WeightUpdate) -> StagedTensors:
        room, self._room = self._room, {}
        return StagedTensors(update.version, {meta.name for meta in update.parameters}, self._parameters, room)

    def stage(self, chunk: WeightChunk) -> None:
        """Stage a chunk's tensors, as `StagedUpdate.stage` says. Lent tensors stay where they are."""
        if self._staged is not None:
            self._staged.offer(chunk.loan)
        super().stage(chunk)

    def commit(self, version: int) -> None:
        """Serve the staged weights as `version`. Must not be called during a forward pass.

        Raises:
            WeightSyncError: no update or another version was started, a parameter is missing, or the trainer has ended
                the loan. The old version keeps serving, and the staged tensors stay until the update is aborted or
                another update starts.
        """
        staged = self._complete(version)
        lending = nullcontext() if staged.loan is None else staged.loan.using()
        with lending, torch.inference_mode(False), torch.no_grad():
            if self._own and self._own.keys() <= staged.lent:
                self._borrow(staged)
            else:
                self._leave_loan()
                for name, parameter in self._parameters.items():
                    parameter.copy_(staged.arrived[name])
        self.version, self.is_lost = version, False
        self._checksums, self._arrived_sums = {}, staged.sums
        self.discard()
        if self.are_large:
            del staged
            give_back_freed_memory()
        elif self._on_cpu:
            self._room = staged.room

    def _list_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return the model's parameters by checkpoint name; empty if the checkpoint stores them in another layout."""
        state = unique_state(self._model, self._stored)
        parts = {name: self._stored_form.parts(name) for name in state}
        if any(len(own) > 1 or own[0].entry is not None for own in parts.values()):
            return {}
        named = dict(self._model.named_parameters(remove_duplicate=False))
        return {parts[name][0].name: named[name] for name in state if name in named}

    def _borrow(self, staged: StagedTensors) -> None:
        """Make the lent tensors the model's parameters; copy all other tensors."""
        for name, tensor in self._parameters.items():
            if name not in self._own:
                tensor.copy_(staged.arrived[name])
        lent = staged.arrived
        moved = [name for name, own in self._own.items() if own.data_ptr() != lent[name].data_ptr()]
        for name in moved:
            self._own[name].data = lent[name]
        self._loan = staged.loan
        if moved:
            self._rebind()
            self._parameters = self._find_tensors()

    def _leave_loan(self) -> None:
        """Give lent parameters their own memory again, without values."""
        if self._loan is None:
            return
        with torch.inference_mode(False), torch.no_grad():
            for parameter in self._own.values():
                parameter.data = torch.empty_like(parameter)
            self._rebind()
            self._parameters = self._find_tensors()
        self._loan = None

    def state(self) -> WeightState:
        """Return the version and checksums of the parameters that the forward pass reads, of the kind in which they
        arrived.

        If the parameters are lost, the version is None and there are no checksums.
        """
        if self.is_lost or (self._loan is not None and self._loan.is_over):
            return WeightState(None)
        if not self._checksums:
            self._checksums = {
                name: checksum_like(parameter, self._arrived_sums.get(name))
                for name, parameter in self._parameters.items()
            }
        return WeightState(self.version, dict(self._checksums))
