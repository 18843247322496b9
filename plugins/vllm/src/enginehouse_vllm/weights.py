"""The weights a vLLM replica serves: a new version is staged beside them, and vLLM loads it whole or not at all."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from enginehouse.engines.host_memory import AnonymousMemory, HostMemory, side_by_side
from enginehouse.engines.model import ModelSpec
from enginehouse.engines.weights import (
    ParamMeta,
    WeightChunk,
    WeightState,
    WeightSyncError,
    WeightUpdate,
    checksum,
)
from enginehouse.errors import ModelError
from enginehouse.modeling.loading import quiet_transformers
from enginehouse.modeling.state import unique_state
from enginehouse_vllm.reports import Reports

if TYPE_CHECKING:
    from vllm import AsyncLLMEngine

log = logging.getLogger(__name__)


class WeightsLost(WeightSyncError):
    """An update failed in the midst and the version before it could not be brought back: the replica has no whole model
    and must be started anew."""


@dataclass(frozen=True, slots=True)
class ModelForm:
    """What a model's weights are in its checkpoint, without their values.

    Attributes:
        parameters: shape and dtype by Hugging Face name.
        tied: further names of parameters that are listed under another.
    """

    parameters: Mapping[str, tuple[tuple[int, ...], str]]
    tied: frozenset[str]

    @classmethod
    def of(cls, spec: ModelSpec) -> ModelForm:
        """Ask transformers, on the meta device.

        Raises:
            ModelError: transformers does not know the model.
        """
        from transformers import AutoConfig, AutoModelForCausalLM

        settings: dict[str, Any] = {"trust_remote_code": spec.trust_remote_code}
        try:
            with quiet_transformers(), torch.device("meta"):
                config = AutoConfig.from_pretrained(spec.path, local_files_only=True, **settings)
                model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, spec.dtype), **settings)
        except Exception as error:
            raise ModelError(
                f"the weights of {spec.path!r} cannot be updated: what they are called is asked of transformers, "
                f"which says {type(error).__name__}: {error}"
            ) from error
        stored = _stored_shapes(Path(spec.path))
        state = unique_state(model, frozenset(stored))
        own = {name: tensor for name, tensor in state.items() if name in stored}
        parameters = {
            name: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in own.items()
        }
        elements = sum(tensor.numel() for name, tensor in state.items() if name not in own)
        if elements:  # experts: stored one by one, run as one tensor
            known = model.state_dict()
            parts = {name: shape for name, shape in stored.items() if name not in known}
            if sum(math.prod(shape) for shape in parts.values()) != elements:
                named = ", ".join([name for name in state if name not in own][:5])
                raise ModelError(f"the weights of {spec.path!r} cannot be updated: its files do not hold {named}")
            parameters |= {name: (shape, spec.dtype) for name, shape in parts.items()}
        tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - set(state)
        return cls(parameters, frozenset(tied))


def _stored_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors in a directory's safetensors files, by name."""
    from safetensors import safe_open

    shapes = {}
    for file in path.glob("*.safetensors"):
        with safe_open(str(file), framework="pt") as tensors:
            shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    return shapes


@dataclass(frozen=True, slots=True)
class Place:
    """Where a parameter of a version lies.

    Attributes:
        meta: what it is.
        path: memory that vLLM's processes can map.
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
        if self.copy is None:
            spare, self._spare = self._spare, None
            fits = spare is not None and spare.size >= self._size
            purpose = "to stage a version of the weights beside the one that is served"
            self.copy = spare if fits else AnonymousMemory.create("enginehouse-weights", self._size, purpose)
        if tensor.numel():
            begin = self._offsets[name]
            place = torch.frombuffer(self.copy.memory, dtype=tensor.dtype, count=tensor.numel(), offset=begin)
            place.view(tensor.shape).copy_(tensor.detach())
        return self.copy.path

    def release(self) -> None:
        """Hold nothing any more."""
        for memory in self._held:
            memory.release()

    def source(self) -> dict[str, Any]:
        """Where vLLM's processes find it."""
        return {
            "parameters": [
                [name, place.meta.dtype, list(place.meta.shape), place.path, place.begin, place.checksum]
                for name, place in self.places.items()
            ]
        }


class StagedWeights:
    """Keeps two versions in this host's memory: the one being staged and, to go back to, the one that is served.

    Version 0 is gone back to from the model's directory.

    Args:
        spec: the model, as it was loaded.
        where: names this replica in messages.

    Attributes:
        version: the version served.
    """

    def __init__(self, spec: ModelSpec, where: str):
        self._spec = spec
        self._where = where
        self._form: ModelForm | None = None
        self._staged: Version | None = None
        self._served: Version | None = None
        self._spare: AnonymousMemory | None = None  # of a version nobody needs any more
        self._loading: Version | None = None
        self._reports: Reports | None = None
        self._switching = asyncio.Lock()
        self._lost: str | None = None
        self.version = 0

    def check(self) -> None:
        """See that there is a whole model to serve.

        Raises:
            WeightsLost: there is none.
        """
        if self._lost is not None:
            raise WeightsLost(self._lost)

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

    async def commit(self, llm: AsyncLLMEngine, version: int) -> None:
        """Let vLLM load what was staged, and serve it as `version` without anything computed from older weights.

        Goes on to its end where the caller is cancelled.

        Raises:
            WeightSyncError: no update or another version was started, a parameter is missing, or vLLM could not load
                it; the old version is served.
            WeightsLost: nor could vLLM go back to the old version: it must not serve.
        """
        await asyncio.shield(asyncio.ensure_future(self._commit(llm, version)))

    async def _commit(self, llm: AsyncLLMEngine, version: int) -> None:
        async with self._switching:
            self.check()
            self._loading = staged = self._complete(version)
            try:
                await self._switch(llm, staged.source(), version)
            except WeightsLost:
                raise
            except WeightSyncError as error:
                raise WeightSyncError(f"{error}; version {self.version} is served again", error.parameters) from error
            else:
                before, self._served, self.version = self._served, staged, version
                if self._staged is staged:
                    self._staged = None
                if before is not None:
                    before.release()
                    self._spare = before.copy
            finally:
                self._loading = None
                if staged not in (self._staged, self._served):  # given up in the meantime
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

    async def _switch(self, llm: AsyncLLMEngine, source: dict[str, Any], version: int) -> None:
        """Load a version, or the one that was served before again.

        Raises:
            WeightSyncError: it cannot be loaded; the old one is served.
            WeightsLost: nor can the old one.
        """
        await self._start(llm)
        try:
            await self._step(llm, "check", source)
        except WeightSyncError:
            await self._told(llm.finish_weight_update(), "end the update")
            raise
        try:
            await self._load(llm, version)
        except WeightSyncError as error:
            log.error("%s; going back to version %d", error, self.version)
            try:
                await self._start(llm)
                await self._step(llm, "check", self._before())
                await self._load(llm, self.version)
            except WeightSyncError as worse:
                self._lost = (
                    f"{error}. Nor could version {self.version} be brought back: {worse}. This replica has no whole "
                    "model and serves nothing; start it anew."
                )
                raise WeightsLost(self._lost, error.parameters) from worse
            raise

    async def _start(self, llm: AsyncLLMEngine) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        if self._reports is None:
            reports = Reports(llm.vllm_config.parallel_config.world_size)
            request = WeightTransferInitRequest({"reports": reports.path})
            await self._told(llm.init_weight_transfer_engine(request), "prepare for weight updates")
            self._reports = reports
        await self._told(llm.start_weight_update(), "begin the update")

    async def _step(self, llm: AsyncLLMEngine, step: str, source: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        doing = f"{step} the new weights"
        self._board.clear()
        await self._told(llm.update_weights(WeightTransferUpdateRequest({"step": step, **source})), doing)
        self._board.check(self._where, doing)

    async def _load(self, llm: AsyncLLMEngine, version: int) -> None:
        """Load what was checked, and forget all that was computed from older weights."""
        doing = "put the new weights in place"
        try:
            await self._step(llm, "load", {})
        finally:
            self._board.clear()
            await self._told(llm.finish_weight_update(), doing)
        self._board.check(self._where, doing)
        await self._told(llm.update_weight_version(str(version)), "take the new version's number")
        # Requests that are frozen are computed anew from the new weights, else their keys and values would stay.
        reset = await self._told(llm.reset_prefix_cache(reset_running_requests=True), "reset its prefix cache")
        if not reset:
            raise WeightSyncError(f"{self._where}: vllm did not reset its prefix cache, which older weights computed")

    async def _told(self, call: Any, doing: str) -> Any:
        """vLLM's answer.

        Raises:
            WeightSyncError: it failed. An engine that has died raises vLLM's own `EngineDeadError`.
        """
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            return await call
        except EngineDeadError:
            raise
        except Exception as error:
            raise WeightSyncError(f"{self._where}: vllm could not {doing}: {error}") from error

    @property
    def _board(self) -> Reports:
        assert self._reports is not None
        return self._reports

    def _before(self) -> dict[str, Any]:
        """Where vLLM finds the version that is served."""
        return {"directory": self._spec.path} if self._served is None else self._served.source()

    def discard(self) -> None:
        """Throw away what was staged, unless it is being committed."""
        staged, self._staged = self._staged, None  # its copy is not used again: a thread may still be writing to it
        if staged is not None and staged is not self._loading:
            staged.release()

    async def state(self, llm: AsyncLLMEngine) -> WeightState:
        """The version vLLM itself says it serves.

        No checksums: vLLM fuses and packs parameters, so they cannot be read back as they are served. What is checked
        in their place: each of vLLM's processes sees that it reads every parameter as it was sent, before it loads one,
        and that they fill every parameter of its model.
        """
        async with self._switching:
            return WeightState(int(await llm.get_weight_version()))

    def learn(self) -> None:
        """Find out what the weights are, and that the files hold them all: vLLM loads half a model without a word.

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
