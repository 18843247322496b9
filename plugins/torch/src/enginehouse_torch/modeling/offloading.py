"""Offloads a training engine's state: frees the memory of tensors, and later fills the same tensors again.

A storage is freed and refilled in place, so that everything that refers to it stays valid: views, tied parameters, the
optimizer, FSDP. Offloaded content of

* a GPU is in pinned host memory, which is kept for the next time;
* a CPU is in an unnamed file in the directory of temporary files (`TMPDIR`), because there is no other memory. If that
  directory is itself in memory, offloading saves nothing.

Content that is all zero, like gradients between two steps, is not written.
"""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import IO, Literal

import torch

from enginehouse.engines.storages import give_back_freed_memory, give_up, take_back
from enginehouse.errors import EnginehouseError

__all__ = ["Offloading", "storages"]

Tag = Literal["params", "grads", "optimizer"]
TAGS: tuple[Tag, ...] = ("params", "grads", "optimizer")


class Offloading:
    """Offloads the parameters, gradients and optimizer state of a model, and loads them back.

    Args:
        state: returns the current tensors of each tag. A storage with two tags belongs to the first.
        device: only tensors on this device are offloaded.
        where: the rank, for messages.
        during: returns a context for allocations from a description of the work, as `MemoryGuard.during` does.
    """

    def __init__(
        self,
        state: Callable[[], Mapping[Tag, Iterable[torch.Tensor]]],
        device: torch.device,
        where: str,
        during: Callable[[str], AbstractContextManager[None]],
    ):
        self._state, self._device, self._where, self._during = state, device, where, during
        self._away: dict[Tag, list[OffloadedStorage]] = {}
        self._rooms = {tag: HostRoom(pinned=True) for tag in TAGS} if device.type == "cuda" else {}

    def offload(self, tags: tuple[str, ...]) -> None:
        """Offload the tensors of `tags`; their memory on the device is free on return.

        Raises:
            EnginehouseError: a tag is unknown, or there is no room for its tensors. No tensor is offloaded then.
        """
        missing = [tag for tag in self._expand(tags) if tag not in self._away]
        if not missing:
            return
        seen: set[int] = set()
        for tag, tensors in self._state().items():
            new_storages = {key: storage for key, storage in storages(tensors, self._device).items() if key not in seen}
            seen |= new_storages.keys()
            if tag not in missing:
                continue
            with self._during("offloading state"):
                self._away[tag] = self._put_away(new_storages.values(), self._rooms.get(tag))
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        else:
            give_back_freed_memory()

    def onload(self, tags: tuple[str, ...]) -> None:
        """Load the tensors of `tags` back.

        Raises:
            EnginehouseError: a tag is unknown.
        """
        for tag in self._expand(tags):
            with self._during("loading offloaded state back"):
                for stored in self._away.get(tag, ()):
                    stored.bring_back()
            self._away.pop(tag, None)

    def _put_away(self, storages: Iterable[torch.UntypedStorage], room: HostRoom | None) -> list[OffloadedStorage]:
        """Offload all storages, or none of them if an error occurs."""
        done: list[OffloadedStorage] = []
        try:
            if room is not None:
                room.clear()
            for storage in storages:
                done.append(OffloadedStorage(storage, room, self._where))
            if room is not None:
                room.trim()
        except BaseException:
            for stored in done:
                stored.bring_back()
            raise
        return done

    def need(self, *tags: Tag, to: str) -> None:
        """Check that the tensors of all `tags` are on the device.

        Raises:
            EnginehouseError: a tag is offloaded.
        """
        if away := [tag for tag in tags if tag in self._away]:
            names = " and ".join(away)
            raise EnginehouseError(f"{self._where}: cannot {to} while {names} are offloaded: call onload({away}) first")

    def _expand(self, tags: tuple[str, ...]) -> list[Tag]:
        if unknown := sorted(set(tags) - {*TAGS, "*"}):
            raise EnginehouseError(
                f"{self._where}: unknown tag {unknown[0]!r}: state is offloaded by the tags {', '.join(TAGS)} and '*'"
            )
        return [tag for tag in TAGS if "*" in tags or tag in tags]


class HostRoom:
    """Host memory for offloaded storages, kept between offloads.

    It is allocated in pieces of `piece_bytes`, a power of two, because torch rounds each pinned tensor up to a power
    of two.
    """

    def __init__(self, pinned: bool, piece_bytes: int = 2**26):
        self._pinned, self._piece_bytes = pinned, piece_bytes
        self._pieces: list[torch.Tensor] = []
        self._used = 0

    def clear(self) -> None:
        """Mark all memory as free."""
        self._used = 0

    def take(self, nbytes: int) -> list[torch.Tensor]:
        """Take `nbytes` of memory in parts, each `(bytes,)` of uint8."""
        parts = []
        while nbytes:
            number, offset = divmod(self._used, self._piece_bytes)
            if number == len(self._pieces):
                piece = torch.empty(self._piece_bytes, dtype=torch.uint8, pin_memory=self._pinned)
                self._pieces.append(piece)
            part = self._pieces[number][offset : offset + nbytes]
            parts.append(part)
            self._used += len(part)
            nbytes -= len(part)
        return parts

    def trim(self) -> None:
        """Release pieces that were not used since `clear`."""
        del self._pieces[-(-self._used // self._piece_bytes) :]


class OffloadedStorage:
    """The content of a storage whose memory was freed: in `room` for a GPU, in a file for a CPU.

    Raises:
        EnginehouseError: there is no room for the file.
    """

    def __init__(self, storage: torch.UntypedStorage, room: HostRoom | None, where: str):
        self._storage, self._nbytes = storage, storage.nbytes()
        self._file: IO[bytes] | None = None
        self._parts: list[torch.Tensor] = []
        content = _view_bytes(storage)
        if content.any():
            if room is None:
                self._file = _write_file(storage, where)
            else:
                self._parts = room.take(self._nbytes)
                for part, source in zip(self._parts, content.split([len(part) for part in self._parts]), strict=True):
                    part.copy_(source)
        del content
        give_up(storage)

    def bring_back(self) -> None:
        """Allocate the storage's memory again, and copy its content back."""
        take_back(self._storage, self._nbytes)
        if self._file is not None:
            with self._file as file:
                file.seek(0)
                file.readinto(_view_memory(self._storage))  # type: ignore[attr-defined]
        elif self._parts:
            content = _view_bytes(self._storage)
            for part, target in zip(self._parts, content.split([len(part) for part in self._parts]), strict=True):
                target.copy_(part)
        else:
            _view_bytes(self._storage).zero_()


def _write_file(storage: torch.UntypedStorage, where: str) -> IO[bytes]:
    """Write a storage's content to an unnamed file."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 - open until it is read
    try:
        file.write(_view_memory(storage))
        file.flush()
    except OSError as error:
        file.close()
        raise EnginehouseError(
            f"{where}: there is no room in {tempfile.gettempdir()} for offloaded state; set TMPDIR to a directory "
            f"with more space: {error}"
        ) from error
    return file


def _view_memory(storage: torch.UntypedStorage) -> memoryview:
    """View a host storage as bytes; not by numpy, which would prevent resizing it later."""
    return memoryview((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())).cast("B")


def storages(tensors: Iterable[torch.Tensor], device: torch.device) -> dict[int, torch.UntypedStorage]:
    """Return the storages of tensors on a device, each once, by a stable key.

    For a sharded tensor, return only the storage of this rank's part.
    """
    by_key = {}
    for tensor in tensors:
        local = getattr(tensor, "_local_tensor", tensor)
        storage = local.untyped_storage()
        if storage.device.type == device.type and storage.nbytes():
            by_key[storage._cdata] = storage
    return by_key


def _view_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]
