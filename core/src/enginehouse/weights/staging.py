"""A new version of the weights in this host's memory, beside the one that is served: for engines in other processes.

Such an engine maps the memory and loads a version whole; how, is its plugin's. What a version must be to be loaded, and
when its memory is given back, is here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from enginehouse.engines.model import ModelSpec
from enginehouse.engines.weights import HostMemory, ParamMeta, WeightSyncError, WeightUpdate
from enginehouse.weights.checksums import checksum
from enginehouse.weights.form import ModelForm
from enginehouse.weights.host_memory import AnonymousMemory, side_by_side
from enginehouse.weights.staged_update import StagedUpdate


class WeightsLost(WeightSyncError):
    """An update failed in the midst and the version before it could not be brought back: the replica has no whole model
    and must be started anew."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a parameter of a version lies.

    Attributes:
        meta: what it is.
        path: memory that other processes of this host can map.
        begin: its first byte there.
        checksum: of what has to be there, taken where it came from.
    """

    meta: ParamMeta
    path: str
    begin: int
    checksum: str


class Version:
    """A version of the weights in this host's memory: the transport's own where that can be held, else a copy.

    Args:
        number: what it is served as.
        parameters: what it consists of.
        spare: memory for a copy, that nobody needs any more.

    Attributes:
        arrived: where the parameters lie that have arrived, by name.
        copy: memory of this process, once something had to be copied.
    """

    def __init__(self, number: int, parameters: Sequence[ParamMeta], spare: AnonymousMemory | None = None):
        self.number = number
        self.parameters = {meta.name: meta for meta in parameters}
        self.arrived: dict[str, Place] = {}
        self.copy: AnonymousMemory | None = None
        self._spare = spare
        self._offsets, self._size = side_by_side(parameters)
        self._held: list[HostMemory] = []

    def take(self, name: str, tensor: torch.Tensor, arrived_sum: str | None, memory: HostMemory | None) -> None:
        """Hold or copy a parameter's tensor.

        Raises:
            WeightSyncError: there is not enough memory for a copy.
        """
        if memory is None:
            path, begin = self._copied(name, tensor), self._offsets[name]
        else:
            self._spare = None
            if all(memory is not one for one in self._held):
                self._held.append(memory)  # before it is held: `release` may come at any time
                memory.hold()
            path, begin = memory.path, memory.offsets[name]
        self.arrived[name] = Place(self.parameters[name], path, begin, arrived_sum or checksum(tensor))

    def _copied(self, name: str, tensor: torch.Tensor) -> str:
        copy = self.copy
        if copy is None:
            spare, self._spare = self._spare, None
            fits = spare is not None and spare.size >= self._size
            purpose = "to stage a version of the weights beside the one that is served"
            copy = spare if spare and fits else AnonymousMemory.create("enginehouse-weights", self._size, purpose)
            self.copy = copy
        if tensor.numel():
            begin = self._offsets[name]
            place = torch.frombuffer(copy.memory, dtype=tensor.dtype, count=tensor.numel(), offset=begin)
            place.view(tensor.shape).copy_(tensor.detach())
        return copy.path

    def release(self) -> None:
        """Hold nothing any more."""
        for memory in self._held:
            memory.release()

    def source(self) -> dict[str, Any]:
        """Where the engine's processes find it, as plain data."""
        return {
            "parameters": [
                [name, place.meta.dtype, list(place.meta.shape), place.path, place.begin, place.checksum]
                for name, place in self.arrived.items()
            ]
        }


class StagedWeights(StagedUpdate[Version]):
    """Keeps two versions in this host's memory: the one being staged and, to go back to, the one that is served.

    Args:
        spec: the model, as it was loaded.
        where: names this replica in messages.

    Attributes:
        served: where the version that is served lies; None: in the model's directory, as version 0 does.
        is_lost: whether there are no weights since `forget`: no update has brought any.
    """

    def __init__(self, spec: ModelSpec, where: str):
        super().__init__(where)
        self._spec = spec
        self._form: ModelForm | None = None
        self._spare: AnonymousMemory | None = None  # of a version nobody needs any more
        self._loading: Version | None = None
        self._lost: str | None = None
        self.switching = asyncio.Lock()
        self.served: Version | None = None
        self.is_lost = False

    def forget(self) -> None:
        """The engine has given up the memory of what it served."""
        self.discard()
        self.is_lost = True

    def check(self) -> None:
        """See that there is a whole model to serve.

        Raises:
            WeightsLost: there is none.
        """
        if self._lost is not None:
            raise WeightsLost(self._lost)

    def lose(self, why: str, error: WeightSyncError) -> WeightsLost:
        """Note that there is no whole model any more: `check` raises from now on. Returns what to raise."""
        self._lost = f"{why} This replica has no whole model and serves nothing; start it anew."
        return WeightsLost(self._lost, error.parameters)

    def source(self) -> dict[str, Any]:
        """Where the engine's processes find the version that is served, as plain data."""
        return {"directory": self._spec.path} if self.served is None else self.served.source()

    def _begun(self, update: WeightUpdate) -> Version:
        spare, self._spare = self._spare, None
        return Version(update.version, update.parameters, spare)

    async def serve(self, version: int, switch: Callable[[Version], Awaitable[None]]) -> None:
        """Let the engine load what was staged, and serve it as `version`.

        Goes on to its end where the caller is cancelled.

        Args:
            version: the one that was started.
            switch: makes the engine serve a version, without anything computed from older weights. Where it cannot, it
                makes it serve `served` again and raises `WeightSyncError`; or `lose`s the weights.

        Raises:
            WeightSyncError: no update or another version was started, a parameter is missing, or the engine could not
                load it; the old version is served.
            WeightsLost: nor could it go back to the old version: it must not serve.
        """
        await asyncio.shield(asyncio.ensure_future(self._serve(version, switch)))

    async def _serve(self, version: int, switch: Callable[[Version], Awaitable[None]]) -> None:
        async with self.switching:
            self.check()
            self._loading = staged = self._complete(version)
            try:
                await switch(staged)
            except WeightsLost:
                raise
            except WeightSyncError as error:
                now = (
                    "it has had no weights since it slept"
                    if self.is_lost
                    else f"version {self.version} is served again"
                )
                raise WeightSyncError(f"{error}; {now}", error.parameters) from error
            else:
                before, self.served, self.version, self.is_lost = self.served, staged, version, False
                if self._staged is staged:
                    self._staged = None
                if before is not None:
                    before.release()
                    self._spare = before.copy
            finally:
                self._loading = None
                if staged not in (self._staged, self.served):  # given up in the meantime
                    staged.release()

    def discard(self) -> None:
        """Throw away what was staged, unless it is being committed."""
        staged, self._staged = self._staged, None  # its copy is not used again: a thread may still be writing to it
        if staged is not None and staged is not self._loading:
            staged.release()

    def learn(self) -> None:
        """Find out what the weights are, and that the files hold them all: engines load half a model without a word.

        Raises:
            ModelError: they do not, or transformers does not know the model.
        """
        self._model_form()

    def _model_form(self) -> ModelForm:
        """Takes seconds the first time."""
        if self._form is None:
            self._form = ModelForm.of(self._spec)
        return self._form
