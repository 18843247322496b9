"""Checkpoints of all torch engines, by torch.distributed.checkpoint. Each rank writes its part; any number can read.

The format is the same for every engine and number of ranks, so any engine can continue from it. Entries:
`model.<name>` (float32, the dtype of updates), `optimizer.exp_avg.<name>`, `optimizer.exp_avg_sq.<name>`,
`optimizer.step`, and for each rank `rng.<kind>.<rank>`. A directory appears complete or not at all: it is written under
a temporary name, and renamed once every rank is done. A failure on one rank is raised on all ranks: code that can fail
on a rank runs either in a step that torch guards itself or in `on_every_rank`.

The files `*.distcp` hold only tensors. `.metadata`, which says where each tensor is stored, is a pickle. Reading it
creates only objects of the classes that such a file needs, so a checkpoint from an untrusted source cannot run code.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
import pickle
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from enginehouse.atomic import move_into_place
from enginehouse.errors import describe_os_error
from enginehouse_torch.modeling.files import PARTS, CheckpointError, describe_alternative
from enginehouse_torch.modeling.random_state import random_states, restore_random_states
from enginehouse_torch.modeling.ranks import Ranks

__all__ = ["BackgroundSave", "SavedOptimizer", "TrainState", "load", "save"]

log = logging.getLogger(__name__)

T = TypeVar("T")

METADATA_FILE = ".metadata"
CLASSES = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "pathlib": {"Path", "PosixPath", "WindowsPath"},
    "pathlib._local": {"Path", "PosixPath", "WindowsPath"},
}
"""Names that a file `.metadata` may refer to, by module; torch's dtypes are allowed too."""


class SavedOptimizer(Protocol):
    """The parts of an optimizer that a checkpoint needs.

    Attributes:
        step_number: number of optimizer steps taken; the schedule follows from it.
    """

    step_number: int

    def state(self) -> Mapping[str, torch.Tensor]:
        """Return the optimizer's own moments, not copies, by `"exp_avg.<parameter>"` and `"exp_avg_sq.<parameter>"`."""
        ...

    def restored(self, step_number: int) -> None:
        """Continue from `step_number`, after the caller has overwritten the tensors of `state()` with saved values."""
        ...


@dataclass(frozen=True, slots=True)
class TrainState:
    """The parts of an engine that a checkpoint is written from, or loaded into.

    Attributes:
        model: the engine's own tensors by name, whole or this rank's shards (DTensors); None: the part is left out.
        optimizer: the engine's optimizer; None: the part is left out.
        rng: True if this process's random states are included.
    """

    model: Mapping[str, torch.Tensor] | None
    optimizer: SavedOptimizer | None
    rng: bool

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the engine's own tensors by their names in a checkpoint, without step and random states."""
        tensors = {f"model.{name}": tensor for name, tensor in (self.model or {}).items()}
        if self.optimizer is not None:
            tensors |= {f"optimizer.{name}": tensor for name, tensor in self.optimizer.state().items()}
        return tensors

    def to_write(self, rank: int) -> dict[str, torch.Tensor]:
        """Return all tensors to write, with floating point as float32, and the random states of this `rank` only."""
        written = {name: t.float() if t.is_floating_point() else t for name, t in self.tensors().items()}
        if self.optimizer is not None:
            written["optimizer.step"] = torch.tensor(self.optimizer.step_number)
        if self.rng:
            written |= {f"rng.{kind}.{rank}": value for kind, value in random_states().items()}
        return written


def save(path: str, state: TrainState, ranks: Ranks) -> None:
    """Write the directory `path`, replacing its content once all is written; collective.

    Raises:
        CheckpointError: some rank cannot write its part; `path` is unchanged.
    """
    writer = _Writer.create(path, ranks)
    with (
        _report_failure(path, writer),
        warnings.catch_warnings(action="ignore", category=UserWarning),
    ):  # torch warns that it saves without ranks
        written = on_every_rank(ranks, lambda: state.to_write(ranks.rank))
        dcp.save(written, storage_writer=writer, no_dist=_is_alone(ranks))


class BackgroundSave:
    """Saves that are written while training continues, one at a time.

    `start` copies the state to host memory. The copy is as large as this rank's part of the checkpoint. A thread writes
    the copy. It communicates in its own process group, so that it never mixes with the collectives of training. All
    ranks call `start` and `finish` in the same order.
    """

    def __init__(self, ranks: Ranks):
        self._ranks = ranks
        self._group: dist.ProcessGroup | None = None
        self._saving: tuple[str, _Writer, Future[Any]] | None = None

    def start(self, path: str, state: TrainState) -> None:
        """Copy `state` and begin to write it into the directory `path`, after a save in progress has ended.

        Raises:
            CheckpointError: on some rank the save cannot begin, or the previous save failed.
        """
        self.finish()
        if self._group is None and dist.is_initialized():
            self._group = dist.new_group(backend="gloo")
        writer = _Writer.create(path, self._ranks)
        with _report_failure(path, writer):
            future = dcp.async_save(
                on_every_rank(self._ranks, lambda: state.to_write(self._ranks.rank)),
                storage_writer=writer,
                process_group=self._group,
                no_dist=not dist.is_initialized(),
            )
        assert isinstance(future, Future)
        self._saving = (path, writer, future)

    def finish(self) -> None:
        """Wait for the save in progress, if there is one.

        Raises:
            CheckpointError: the save failed on some rank. The error is raised once.
        """
        if self._saving is None:
            return
        path, writer, future = self._saving
        wait([future])  # an interrupt here leaves the save in progress
        self._saving = None
        with _report_failure(path, writer):
            future.result()

    def close(self) -> None:
        """Wait for the save in progress; log a failure."""
        try:
            self.finish()
        except CheckpointError as error:
            log.error("%s", error)
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None


def load(
    path: str, state: TrainState, ranks: Ranks, check: Callable[[Sequence[str]], None] = lambda names: None
) -> None:
    """Overwrite the tensors of `state` with a checkpoint of any torch engine in the directory `path`; collective.

    A rank without a random state in the checkpoint keeps its own.

    Args:
        path: the checkpoint.
        state: the tensors to overwrite.
        ranks: this process and the other ranks.
        check: called on every rank with the names of the checkpoint's entries of the model, before anything is
            overwritten. It may raise a `CheckpointError`.

    Raises:
        CheckpointError: on some rank the checkpoint is missing, incomplete, damaged, of another model, or lacks a part.
            Nothing was overwritten, unless the damage is inside a file.
    """

    def prepare() -> tuple[dcp.Metadata, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        metadata = _read_metadata(path)
        entries = metadata.state_dict_metadata
        check([name.removeprefix("model.") for name in entries if name.startswith("model.")])
        if ranks.rank == 0:
            _check_files(path, metadata)
        tensors = state.tensors()
        _check_entries(path, metadata, state, tensors)
        states = random_states() if state.rng else {}
        return metadata, tensors, {k: v for k, v in states.items() if f"rng.{k}.{ranks.rank}" in entries}

    metadata, tensors, own_random = on_every_rank(ranks, prepare)
    step = torch.zeros((), dtype=torch.int64)
    targets = tensors | {f"rng.{kind}.{ranks.rank}": value for kind, value in own_random.items()}
    if state.optimizer is not None:
        targets["optimizer.step"] = step
    try:
        with torch.no_grad(), warnings.catch_warnings(action="ignore", category=UserWarning):
            dcp.load(targets, storage_reader=_Reader(path, metadata), no_dist=_is_alone(ranks))
    except (CheckpointException, Exception) as error:
        raise CheckpointError(
            f"checkpoint {path!r} is damaged: {_describe(error)}. The engine's state is now partly old and partly new: "
            "load another checkpoint before you continue"
        ) from error
    if state.optimizer is not None:
        state.optimizer.restored(int(step))
    restore_random_states(own_random)


class _Writer(dcp.FileSystemWriter):
    """Writes into a directory that becomes `target` once every rank has written its part."""

    def __init__(self, partial: Path, target: Path, ranks: Ranks):
        super().__init__(partial)
        self._partial, self._target, self._ranks = partial, target, ranks

    @classmethod
    def create(cls, path: str, ranks: Ranks) -> _Writer:
        """Create a writer for `path`, after removing what a killed save left; collective.

        Raises:
            CheckpointError: the directory cannot be created.
        """
        target = Path(path)
        partial = target.with_name(f".{target.name}.partial")

        def prepare() -> None:
            if ranks.rank != 0:
                return
            try:
                if partial.exists():
                    shutil.rmtree(partial)
                partial.mkdir(parents=True)
            except OSError as error:
                raise CheckpointError(f"checkpoint {path!r} cannot be written: {describe_os_error(error)}") from error

        on_every_rank(ranks, prepare)
        return cls(partial, target, ranks)

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the copy in host memory that a background save writes; collective."""
        return on_every_rank(self._ranks, lambda: super(_Writer, self).stage(state_dict))

    def finish(self, metadata: Any, results: Any) -> None:
        """On rank 0 move the directory into place once all ranks have written. A failure is raised on every rank."""
        super().finish(metadata, results)
        move_into_place(self._partial, self._target)

    def remove(self) -> None:
        """Remove the files of a failed save."""
        if self._ranks.rank == 0:
            shutil.rmtree(self._partial, ignore_errors=True)


class _Reader(dcp.FileSystemReader):
    """Reads the files that `metadata` names, without reading `.metadata` again, which might fail on a single rank."""

    def __init__(self, path: str, metadata: dcp.Metadata):
        super().__init__(path)
        self._metadata = metadata
        if metadata.storage_meta is not None:
            metadata.storage_meta.load_id = self.load_id

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        return self._metadata


class _Unpickler(pickle._Unpickler):
    """Unpickles only objects of allowed classes, and sets only the state of these new objects."""

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)
    stack: list[Any]

    def find_class(self, module: str, name: str) -> Any:
        if name in CLASSES.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which no checkpoint needs")

    def load_build(self) -> None:
        changed = self.stack[-2]
        if isinstance(changed, type) or not is_dataclass(changed):
            raise pickle.UnpicklingError(f"it changes the state of {changed!r}, which no checkpoint needs")
        super().load_build()  # type: ignore[misc]  # typeshed lacks it

    dispatch[pickle.BUILD[0]] = load_build


def _is_alone(ranks: Ranks) -> bool:
    return ranks.world_size == 1 or not dist.is_initialized()


def on_every_rank(ranks: Ranks, action: Callable[[], T]) -> T:
    """Return the result of `action` on this rank, once it has succeeded on every rank; collective.

    Raises:
        CheckpointError: `action` failed on some rank. Every rank raises it, so that none waits for a stopped rank.
    """
    value: T | None = None
    failure: BaseException | None = None
    try:
        value = action()
    except (CheckpointException, Exception) as error:  # CheckpointException is no Exception
        failure = error
    failures = ranks.gather(None if failure is None else (isinstance(failure, CheckpointError), _describe(failure)))
    for rank, failed in enumerate(failures):
        if failed is not None:
            explains_itself, message = failed
            raise CheckpointError(message if explains_itself else f"rank {rank}: {message}") from failure
    return value  # type: ignore[return-value]


@contextlib.contextmanager
def _report_failure(path: str, writer: _Writer) -> Iterator[None]:
    """Remove a partly written checkpoint if the block fails, and raise an error that names it."""
    try:
        yield
    except (CheckpointException, Exception) as error:
        writer.remove()
        raise CheckpointError(f"checkpoint {path!r} was not written: {_describe(error)}") from error


def _describe(error: BaseException) -> str:
    """Describe an error in one line; torch reports the errors of all ranks as one."""
    if isinstance(error, CheckpointException):
        return "; ".join(f"rank {rank}: {_describe(cause)}" for rank, (cause, _) in sorted(error.failures.items()))
    if isinstance(error, pickle.UnpicklingError):  # torch's own text advises to read it unsafely
        return "a file holds bytes that are not a tensor"
    if isinstance(error, CheckpointError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _read_metadata(path: str) -> dcp.Metadata:
    """Read the file `.metadata`.

    Raises:
        CheckpointError: the file is missing or cannot be read.
    """
    directory = Path(path)
    file = directory / METADATA_FILE
    if not file.is_file():
        if any(directory.glob("*.distcp")):
            raise CheckpointError(f"checkpoint {path!r} is incomplete (no file .metadata, which is written last)")
        raise CheckpointError(f"{path!r} holds no checkpoint (no file .metadata){describe_alternative(directory)}")
    try:
        with open(file, "rb") as stream:
            metadata = _Unpickler(stream).load()
        if not isinstance(metadata, dcp.Metadata):
            raise pickle.UnpicklingError(f"it must hold metadata of a checkpoint, not a {type(metadata).__name__}")
    except Exception as error:  # a damaged pickle raises almost any exception
        raise CheckpointError(f"checkpoint {path!r} has a damaged .metadata: {error}") from error
    return metadata


def _check_files(path: str, metadata: dcp.Metadata) -> None:
    """Raise an error unless every file has the length that `metadata` states."""
    lengths: dict[str, int] = {}
    for place in (metadata.storage_data or {}).values():
        lengths[place.relative_path] = max(lengths.get(place.relative_path, 0), place.offset + place.length)
    for name, length in lengths.items():
        file = Path(path) / name
        if not file.is_file():
            raise CheckpointError(f"checkpoint {path!r} is incomplete: the file {name} is missing")
        if (size := file.stat().st_size) < length:
            raise CheckpointError(f"checkpoint {path!r} is damaged: {name} has {size} of its {length} bytes")


def _check_entries(path: str, metadata: dcp.Metadata, state: TrainState, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise an error unless the checkpoint has the requested parts and tensors, in the same shapes."""
    stored = {name: tuple(getattr(entry, "size", ())) for name, entry in metadata.state_dict_metadata.items()}
    saved_parts = [part for part in PARTS if any(name.startswith(f"{part}.") for name in stored)]
    requested = (state.model is not None, state.optimizer is not None, state.rng)
    for part in (part for part, is_requested in zip(PARTS, requested, strict=True) if is_requested):
        if part not in saved_parts:
            raise CheckpointError(f"checkpoint {path!r} has no {part}: it was saved only with {', '.join(saved_parts)}")
    reason = "it is a checkpoint of another model"
    if state.optimizer is not None and "optimizer.step" not in stored:
        raise CheckpointError(f"checkpoint {path!r} lacks 'optimizer.step': {reason}")
    lacking = sorted(name for name in tensors if name not in stored)
    if lacking:
        close = difflib.get_close_matches(lacking[0], sorted(stored), n=1)
        nearest = f"; nearest name: {close[0]!r}" if close else ""
        count = len(lacking)
        raise CheckpointError(f"checkpoint {path!r} lacks {lacking[0]!r} ({count} in all{nearest}): {reason}")
    if state.model is not None:
        unknown = sorted(name for name in stored if name.startswith("model.") and name not in tensors)
        if unknown:
            count = len(unknown)
            raise CheckpointError(f"checkpoint {path!r} has an unknown entry {unknown[0]!r} ({count} in all): {reason}")
    for name, tensor in tensors.items():
        if stored[name] != tuple(tensor.shape):
            raise CheckpointError(
                f"{name!r} in checkpoint {path!r} has shape {stored[name]}, but this engine's has "
                f"{tuple(tensor.shape)}: {reason}"
            )
