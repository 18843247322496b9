"""Stages a version of the weights in this host's memory, beside the served version, for engines in other processes.

Such an engine maps the memory and loads a version completely, by its plugin's code. This module keeps the memory of the
staged and of the served version, and releases it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from enginehouse.engines.model import ModelSpec
from enginehouse.engines.weights import HostMemory, ParamMeta, WeightState, WeightSyncError, WeightUpdate
from enginehouse.errors import EnginehouseError
from enginehouse.weights.checksums import checksum
from enginehouse.weights.form import ModelForm
from enginehouse.weights.host_memory import AnonymousMemory, lay_out
from enginehouse.weights.read_back import merge_read
from enginehouse.weights.staged_update import StagedUpdate

log = logging.getLogger(__name__)

Load = Callable[[int, "Version | None"], Awaitable[None]]
"""Makes an engine serve a version, and drops what was computed from older weights unless it is kept. It gets the
version's number, and the `Version`, or None for version 0."""


class WeightsLost(WeightSyncError):
    """An update failed and the previous version could not be restored, so the replica must be restarted."""


class Version:
    """A version of the weights in this host's memory: the transport's own memory if it can be held, else a copy.

    Args:
        spare: unused memory, for a copy.

    Attributes:
        arrived: the entry in `source` of each parameter that has arrived, by name.
        copy: memory of this process with the copied parameters; None before the first copy.
        read: checksum of each parameter that the engine has read back after it loaded the version, as it reports; None
            if it reads none back.
    """

    def __init__(self, number: int, parameters: Sequence[ParamMeta], spare: AnonymousMemory | None = None):
        self.number = number
        self.parameters = {meta.name: meta for meta in parameters}
        self.arrived: dict[str, list[Any]] = {}
        self.copy: AnonymousMemory | None = None
        self.read: Mapping[str, str] | None = None
        self._spare = spare
        self._offsets, self._size = lay_out(parameters)
        self._held: list[HostMemory] = []

    def take(self, name: str, tensor: torch.Tensor, arrived_sum: str | None, memory: HostMemory | None) -> None:
        """Hold or copy a parameter's tensor. Raises `WeightSyncError` if there is not enough memory for a copy."""
        if memory is None:
            path, begin = self._copy(name, tensor), self._offsets[name]
        else:
            self._spare = None
            if all(memory is not held for held in self._held):
                self._held.append(memory)  # before `hold`, because `release` may come at any time
                memory.hold()
            path, begin = memory.path, memory.offsets[name]
        meta = self.parameters[name]
        self.arrived[name] = [name, meta.dtype, list(meta.shape), path, begin, arrived_sum or checksum(tensor)]

    def _copy(self, name: str, tensor: torch.Tensor) -> str:
        copy = self.copy
        if copy is None:
            spare, self._spare = self._spare, None
            fits = spare is not None and spare.size >= self._size
            purpose = "to stage a version of the weights beside the served version"
            copy = spare if spare and fits else AnonymousMemory.create("enginehouse-weights", self._size, purpose)
            self.copy = copy
        if tensor.numel():
            begin = self._offsets[name]
            place = torch.frombuffer(copy.memory, dtype=tensor.dtype, count=tensor.numel(), offset=begin)
            place.view(tensor.shape).copy_(tensor.detach())
        return copy.path

    def release(self) -> None:
        """Release all held memory of the transport."""
        for memory in self._held:
            memory.release()

    def note_read(self, reports: Sequence[Any]) -> None:
        """Note what was read back: by rank of the engine, the result of `ReadBack.compare`."""
        self.read = None if None in reports else merge_read(self.arrived.values(), reports)

    def state(self) -> WeightState:
        """Return the state of an engine that serves this version."""
        if not self.read:
            return WeightState(self.number)
        return WeightState(self.number, self.read, tuple(name for name in self.arrived if name not in self.read))

    def source(self) -> dict[str, Any]:
        """Return each parameter's name, dtype, shape, path, first byte and checksum as plain data."""
        return {"parameters": list(self.arrived.values())}


class StagedWeights(StagedUpdate[Version]):
    """Keeps two versions in this host's memory: the staged version, and the served version, which is loaded again if an
    update fails.

    Attributes:
        adapter: `ModelSpec.adapter`; if there is one, versions are adapters.
        served: the served version; None if it is version 0, in the model's directory.
        is_lost: True if no update has brought weights since `forget`.
    """

    def __init__(self, spec: ModelSpec, where: str):
        super().__init__(where)
        self._spec = spec
        self.adapter = spec.adapter
        self._form: ModelForm | None = None
        self._spare: AnonymousMemory | None = None  # memory of an old version
        self._loading: Version | None = None
        self._lost: str | None = None
        self.switching = asyncio.Lock()
        self.served: Version | None = None
        self.is_lost = False

    def forget(self) -> None:
        """Record that the engine has freed the memory of its weights.

        Raises:
            EnginehouseError: if updates bring an adapter alone, so that no update brings the weights back.
        """
        if self.adapter is not None:
            raise EnginehouseError(f"{self._where}: updates bring an adapter alone, so the weights cannot sleep")
        self.discard()
        self.is_lost = True

    def check(self) -> None:
        """Raise `WeightsLost` if there is no complete model to serve."""
        if self._lost is not None:
            raise WeightsLost(self._lost)

    def state_of(self, number: int) -> WeightState:
        """Return the state of an engine that says it serves `number`."""
        served = self.served
        return WeightState(number) if served is None or served.number != number else served.state()

    def source_of(self, version: Version | None) -> dict[str, Any]:
        """Return as plain data where the engine's processes find a version; None is version 0."""
        if version is not None:
            return version.source()
        return {"directory": self._spec.path} if self.adapter is None else {"parameters": []}

    def _begun(self, update: WeightUpdate) -> Version:
        spare, self._spare = self._spare, None
        return Version(update.version, update.parameters, spare)

    async def serve(self, version: int, load: Load, begin: Callable[[], Awaitable[None]] | None = None) -> None:
        """Let the engine load the staged version, and serve it as `version`. If that fails, let the engine load the
        served version again. Cancelling the caller does not stop this.

        Args:
            version: the version that was started.
            load: makes the engine serve a version, or raises `WeightSyncError`.
            begin: called before each load. If it raises `WeightSyncError` before the first one, the engine still serves
                the old version.

        Raises:
            WeightSyncError: no update or another version was started, a parameter is missing, or the engine could not
                load the version. The old version is served.
            WeightsLost: the engine could not load the old version again either, or not begin to, and must not serve.
        """
        await asyncio.shield(asyncio.ensure_future(self._serve(version, load, begin)))

    async def _serve(self, version: int, load: Load, begin: Callable[[], Awaitable[None]] | None) -> None:
        async with self.switching:
            self.check()
            self._loading = staged = self._complete(version)
            try:
                await self._load_or_go_back(staged, load, begin or _do_nothing)
            except WeightsLost:
                raise
            except WeightSyncError as error:
                again = f"version {self.version} is served again"
                now = "the engine has had no weights since it slept" if self.is_lost else again
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
                if staged not in (self._staged, self.served):  # discarded in the meantime
                    staged.release()

    async def _load_or_go_back(self, staged: Version, load: Load, begin: Callable[[], Awaitable[None]]) -> None:
        """Load a version. If that fails, load the served version again, and raise the error."""
        await begin()
        try:
            await load(staged.number, staged)
        except WeightSyncError as error:
            log.error("%s; loading version %d again", error, self.version)
            try:
                await begin()
                await load(self.version, self.served)
            except WeightSyncError as worse:
                self._lost = (
                    f"{error}. Version {self.version} could not be loaded again either: {worse}. "
                    "This replica has no complete model and serves nothing; start it again."
                )
                raise WeightsLost(self._lost, error.parameters) from worse
            raise

    def discard(self) -> None:
        """Drop the staged version, unless it is being committed."""
        staged, self._staged = self._staged, None  # its copy is not reused, because a thread may still write to it
        if staged is not None and staged is not self._loading:
            staged.release()

    @property
    def parameters(self) -> Collection[str]:
        """Names of the parameters that an update may bring."""
        return self._model_form().parameters

    def learn(self) -> None:
        """Find the names, shapes and dtypes of the weights, and check that the files hold every parameter. Engines load
        an incomplete model without an error. Raises `ModelError` if the files lack a parameter, or transformers does
        not know the model."""
        self._model_form()

    def _model_form(self) -> ModelForm:
        """Return the names, shapes and dtypes of the model's weights. The first call takes seconds."""
        if self._form is None:
            self._form = ModelForm.of(self._spec)
        return self._form


async def _do_nothing() -> None:
    pass
