"""The weights a vLLM replica serves: a new version is staged beside them, and vLLM loads it whole or not at all."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

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
from enginehouse_vllm.segment import Segment

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


@dataclass(slots=True)
class Version:
    """A version of the weights in a segment.

    Attributes:
        number: what it is served as.
        parameters: what it consists of, each with its first byte in the segment.
        segment: the memory.
        sums: checksum of each parameter that has arrived, taken where it came from.
    """

    number: int
    parameters: Mapping[str, tuple[ParamMeta, int]]
    segment: Segment
    sums: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def placed(parameters: Sequence[ParamMeta]) -> tuple[dict[str, tuple[ParamMeta, int]], int]:
        """The parameters by name, each with its first byte, and how many bytes that makes."""
        begin = 0
        places = {}
        for meta in parameters:
            places[meta.name] = meta, begin
            begin += meta.aligned_nbytes
        return places, begin

    def take(self, name: str, tensor: torch.Tensor, arrived: str | None) -> None:
        """Copy a parameter's tensor here; `arrived` is its checksum, where it was taken already."""
        meta, begin = self.parameters[name]
        if meta.nbytes:
            place = torch.frombuffer(self.segment.memory, dtype=tensor.dtype, count=tensor.numel(), offset=begin)
            place.view(tensor.shape).copy_(tensor.detach())
        self.sums[name] = arrived or checksum(tensor)

    def source(self) -> dict[str, Any]:
        """Where vLLM's processes find it."""
        return {
            "segment": self.segment.path,
            "parameters": [
                [name, meta.dtype, list(meta.shape), begin, self.sums[name]]
                for name, (meta, begin) in self.parameters.items()
            ],
        }


class StagedWeights:
    """Holds two versions in this host's memory: the one being staged and, to go back to, the one that is served.

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
        self._spare: Segment | None = None  # memory of a version nobody needs any more
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

        Takes seconds the first time, when the model's form is asked for and memory is taken.

        Raises:
            WeightSyncError: the version is not newer, a parameter is not one of the model's, or there is not enough
                memory.
        """
        self.discard()
        if update.version <= self.version:
            raise WeightSyncError(f"{self._where} serves version {self.version}; version {update.version} is not newer")
        for meta in update.parameters:
            self._check_parameter(meta.name, tuple(meta.shape), meta.dtype)
        places, size = Version.placed(update.parameters)
        segment, self._spare = self._spare, None
        if segment is None or segment.size < size:
            segment = Segment(size)
        self._staged = Version(update.version, places, segment)

    def stage(self, chunk: WeightChunk) -> None:
        """Copy a chunk's tensors beside what is served.

        Raises:
            WeightSyncError: no update was started; unknown name, wrong shape or dtype.
        """
        staged = self._staged  # not that of an update started while this one is being given up
        if staged is None:
            raise WeightSyncError(f"{self._where} was sent weights, but no weight update was started")
        for name, tensor in chunk.tensors:
            self._check_parameter(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            if name not in staged.parameters:
                raise WeightSyncError(f"{self._where} was sent {name!r}, which was not announced", parameters=[name])
            staged.take(name, tensor, chunk.checksums.get(name))

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
            staged = self._complete(version)
            try:
                await self._switch(llm, staged.source(), version)
            except WeightsLost:
                raise
            except WeightSyncError as error:
                raise WeightSyncError(f"{error}; version {self.version} is served again", error.parameters) from error
            self._spare = self._served.segment if self._served is not None else None
            self._served, self.version = staged, version
            if self._staged is staged:
                self._staged = None

    def _complete(self, version: int) -> Version:
        """The staged version, if it is this one and whole."""
        staged = self._staged
        if staged is None or staged.number != version:
            begun = "none was started" if staged is None else f"version {staged.number} was started"
            raise WeightSyncError(f"{self._where} cannot finish the weight update to version {version}: {begun}")
        missing = [name for name in self._known().parameters if name not in staged.sums]
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
        self._staged = None  # its memory is not used again: a thread may still be copying into it

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
