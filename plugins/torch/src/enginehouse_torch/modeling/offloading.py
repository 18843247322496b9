"""Putting a training engine's state away and bringing it back: the same tensors, whose memory is given up meanwhile.

A storage gives up its memory and is filled again, so that whatever refers to it goes on to: views, tied parameters, the
optimizer, FSDP. What it held lies meanwhile

* on a GPU's host: in pinned memory, which is kept from one time to the next;
* on a CPU: in a file without a name, in the directory of temporary files (`TMPDIR`). There is no other memory to move
  to; where that directory is in memory itself, nothing is won.

What is all zero, as gradients between two steps, is not written down.
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
    """Where the parameters, gradients and optimizer state of a model are.

    Args:
        state: the tensors of each tag, as of when it is called. A storage that has two tags has the first.
        device: what of them lies there is put away.
        where: the rank, for messages.
        during: guards what takes memory, given what it does, as `MemoryGuard.during`.
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
        """Put away what `tags` name; the device's memory is free when this returns.

        Raises:
            EnginehouseError: a tag is unknown, or there is no room for it. What of a tag was put away before an error
                is back.
        """
        wanted = [tag for tag in self._known(tags) if tag not in self._away]
        if not wanted:
            return
        seen: set[int] = set()
        for tag, tensors in self._state().items():
            own = {key: storage for key, storage in storages(tensors, self._device).items() if key not in seen}
            seen |= own.keys()
            if tag not in wanted:
                continue
            with self._during("putting state away"):
                self._away[tag] = self._stored(own.values(), self._rooms.get(tag))
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        else:
            give_back_freed_memory()

    def onload(self, tags: tuple[str, ...]) -> None:
        """Bring back what `tags` name.

        Raises:
            EnginehouseError: a tag is unknown.
        """
        for tag in self._known(tags):
            with self._during("bringing back what was offloaded"):
                for stored in self._away.get(tag, ()):
                    stored.bring_back()
            self._away.pop(tag, None)

    def _stored(self, given: Iterable[torch.UntypedStorage], room: HostRoom | None) -> list[OffloadedStorage]:
        """Put storages away, all or none of them."""
        kept: list[OffloadedStorage] = []
        try:
            if room is not None:
                room.clear()
            for storage in given:
                kept.append(OffloadedStorage(storage, room, self._where))
            if room is not None:
                room.trim()
        except BaseException:
            for stored in kept:
                stored.bring_back()
            raise
        return kept

    def need(self, *tags: Tag, to: str) -> None:
        """Raise unless all of `tags` are here.

        Raises:
            EnginehouseError: one is offloaded.
        """
        if away := [tag for tag in tags if tag in self._away]:
            named = " and ".join(away)
            raise EnginehouseError(f"{self._where}: cannot {to} while {named} are offloaded: call onload({away}) first")

    def _known(self, tags: tuple[str, ...]) -> list[Tag]:
        if unknown := sorted(set(tags) - {*TAGS, "*"}):
            raise EnginehouseError(
                f"{self._where}: nothing called {unknown[0]!r} can be offloaded; there are {', '.join(TAGS)}, or '*'"
            )
        return [tag for tag in TAGS if "*" in tags or tag in tags]


class HostRoom:
    """Host memory for what a device gives up, kept from one time to the next.

    It is taken in pieces of one size: torch rounds what it pins up to a power of two, each tensor by itself.

    Args:
        pinned: whether it is, for quicker copies.
        piece_bytes: of each piece; a power of two.
    """

    def __init__(self, pinned: bool, piece_bytes: int = 2**26):
        self._pinned, self._piece_bytes = pinned, piece_bytes
        self._pieces: list[torch.Tensor] = []
        self._used = 0

    def clear(self) -> None:
        """Begin anew: nobody needs what is in it."""
        self._used = 0

    def take(self, nbytes: int) -> list[torch.Tensor]:
        """Further room of so many bytes, in parts, each `(bytes,)` of uint8."""
        parts = []
        while nbytes:
            number, at = divmod(self._used, self._piece_bytes)
            if number == len(self._pieces):
                piece = torch.empty(self._piece_bytes, dtype=torch.uint8, pin_memory=self._pinned)
                self._pieces.append(piece)
            part = self._pieces[number][at : at + nbytes]
            parts.append(part)
            self._used += len(part)
            nbytes -= len(part)
        return parts

    def trim(self) -> None:
        """Give up what was not taken since it was cleared."""
        del self._pieces[-(-self._used // self._piece_bytes) :]


class OffloadedStorage:
    """What a storage held, which has given up its memory.

    Args:
        storage: it is empty afterwards.
        room: where what a GPU gives up lies; None of a CPU, whose lies in a file.
        where: the rank, for messages.

    Raises:
        EnginehouseError: there is no room for the file.
    """

    def __init__(self, storage: torch.UntypedStorage, room: HostRoom | None, where: str):
        self._storage, self._nbytes = storage, storage.nbytes()
        self._file: IO[bytes] | None = None
        self._parts: list[torch.Tensor] = []
        held = _view_bytes(storage)
        if held.any():
            if room is None:
                self._file = _write_file(storage, where)
            else:
                self._parts = room.take(self._nbytes)
                for part, given in zip(self._parts, held.split([len(part) for part in self._parts]), strict=True):
                    part.copy_(given)
        del held
        give_up(storage)

    def bring_back(self) -> None:
        """Fill the storage again."""
        take_back(self._storage, self._nbytes)
        if self._file is not None:
            with self._file as file:
                file.seek(0)
                file.readinto(_view_memory(self._storage))  # type: ignore[attr-defined]
        elif self._parts:
            held = _view_bytes(self._storage)
            for part, taken in zip(self._parts, held.split([len(part) for part in self._parts]), strict=True):
                taken.copy_(part)
        else:
            _view_bytes(self._storage).zero_()


def _write_file(storage: torch.UntypedStorage, where: str) -> IO[bytes]:
    """A file without a name that holds what a storage does."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 - open until it is read
    try:
        file.write(_view_memory(storage))
        file.flush()
    except OSError as error:
        file.close()
        raise EnginehouseError(
            f"{where}: there is no room in {tempfile.gettempdir()} for what is put away; set TMPDIR to a directory "
            f"with more: {error}"
        ) from error
    return file


def _view_memory(storage: torch.UntypedStorage) -> memoryview:
    """A host's storage as bytes. Not by numpy, after which it could not be resized any more."""
    return memoryview((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())).cast("B")


def storages(tensors: Iterable[torch.Tensor], device: torch.device) -> dict[int, torch.UntypedStorage]:
    """The storages of tensors that lie on a device, each once, by a key that stays the same; of sharded tensors this
    rank's part."""
    found = {}
    for tensor in tensors:
        local = getattr(tensor, "_local_tensor", tensor)
        storage = local.untyped_storage()
        if storage.device.type == device.type and storage.nbytes():
            found[storage._cdata] = storage
    return found


def _view_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]
