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
from enginehouse.engines.weights import HostMemory, ParamMeta, WeightChunk, WeightSyncError, WeightUpdate
from enginehouse.weights.checksums import checksum
from enginehouse.weights.form import ModelForm
from enginehouse.weights.host_memory import AnonymousMemory, side_by_side


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
        places: where the parameters lie that have arrived, by name.
        copy: memory of this process, once something had to be copied.
    """

    def __init__(self, number: int, parameters: Sequence[ParamMeta], spare: AnonymousMemory | None = None):
        self.number = number
        self.parameters = {meta.name: meta for meta in parameters}
        self.places: dict[str, Place] = {}
        self.copy: AnonymousMemory | None = None
        self._spare = spare
        self._offsets, self._size = side_by_side(parameters)
        self._held: list[HostMemory] = []

    def take(self, name: str, tensor: torch.Tensor, arrived: str | None, memory: HostMemory | None) -> None:
        """Hold or copy a parameter's tensor; `arrived` is its checksum, where it was taken already.

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
        self.places[name] = Place(self.parameters[name], path, begin, arrived or checksum(tensor))

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
                for name, place in self.places.items()
            ]
        }


class StagedWeights:
    """Keeps two versions in this host's memory: the one being staged and, to go back to, the one that is served.

    Args:
        spec: the model, as it was loaded.
        where: names this replica in messages.

    Attributes:
        version: the version served.
        served: where it lies; None: in the model's directory, as version 0 does.
    """

    def __init__(self, spec: ModelSpec, where: str):
        self._spec = spec
        self._where = where
        self._form: ModelForm | None = None
        self._staged: Version | None = None
        self._spare: AnonymousMemory | None = None  # of a version nobody needs any more
        self._loading: Version | None = None
        self._lost: str | None = None
        self.switching = asyncio.Lock()
        self.served: Version | None = None
        self.version = 0

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

    def start(self, update: WeightUpdate) -> None:
        """Be ready to stage `update`; what an earlier, unfinished one staged is thrown away.

        Takes seconds the first time, when the model's form is asked for.

        Raises:
            WeightSyncError: the version is not newer, or a parameter is not one of the model's.
        """
        self.discard()
        if update.version <= self.version:
            raise WeightSyncError(f"{self._where} serves version {self.version}; version {update.version} is not newer")
        for meta in update.parameters:
            self._check_parameter(meta.name, tuple(meta.shape), meta.dtype)
        spare, self._spare = self._spare, None
        self._staged = Version(update.version, update.parameters, spare)

    def stage(self, chunk: WeightChunk) -> None:
        """Keep a chunk's tensors beside what is served.

        Raises:
            WeightSyncError: no update was started; unknown name, wrong shape or dtype; there is not enough memory.
        """
        staged = self._staged  # not that of an update started while this one is being given up
        if staged is None:
            raise WeightSyncError(f"{self._where} was sent weights, but no weight update was started")
        for name, tensor in chunk.tensors:
            self._check_parameter(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            if name not in staged.parameters:
                raise WeightSyncError(f"{self._where} was sent {name!r}, which was not announced", parameters=[name])
            staged.take(name, tensor, chunk.checksums.get(name), chunk.memory)

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
                raise WeightSyncError(f"{error}; version {self.version} is served again", error.parameters) from error
            else:
                before, self.served, self.version = self.served, staged, version
                if self._staged is staged:
                    self._staged = None
                if before is not None:
                    before.release()
                    self._spare = before.copy
            finally:
                self._loading = None
                if staged not in (self._staged, self.served):  # given up in the meantime
                    staged.release()

    def _complete(self, version: int) -> Version:
        """The staged version, if it is this one and whole."""
        staged = self._staged
        if staged is None or staged.number != version:
            begun = "none was started" if staged is None else f"version {staged.number} was started"
            raise WeightSyncError(f"{self._where} cannot finish the weight update to version {version}: {begun}")
        missing = [name for name in self._known().parameters if name not in staged.places]
        if missing:
            named = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            raise WeightSyncError(
                f"weight update to version {version} at {self._where} lacks {named}; "
                f"version {self.version} keeps serving",
                parameters=missing,
            )
        return staged

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
        self._known()

    def _known(self) -> ModelForm:
        if self._form is None:
            self._form = ModelForm.of(self._spec)
        return self._form

    def _check_parameter(self, name: str, shape: tuple[int, ...], dtype: str) -> None:
        form = self._known()
        known = form.parameters.get(name)
        if known is None:
            reason = " (it is tied to another, which must come alone)" if name in form.tied else ""
            raise WeightSyncError(f"{self._where} has no parameter {name!r}{reason}", parameters=[name])
        if known != (shape, dtype):
            raise WeightSyncError(
                f"parameter {name!r} was sent to {self._where} as {dtype} {shape}, "
                f"but the model there has {known[1]} {known[0]}",
                parameters=[name],
            )
