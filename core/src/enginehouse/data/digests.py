"""Digests of files: whether a file is still, byte for byte, what it was.

XXH3 of 128 bits: it finds what chance does to a file, at the speed of memory; it is no defence against a forger.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

_THREADS = 8
"""Files read at a time; the hash lets go of the interpreter."""


def text_digest(text: str) -> str:
    """Digest of a text, in hexadecimal."""
    return _xxh3()(text.encode("utf-8", "surrogatepass")).hexdigest()


def file_digest(path: str | Path, *, to_disk: bool = False) -> str:
    """Digest of a file's bytes, in hexadecimal.

    Args:
        to_disk: see to it that the file is on disk, too, when this returns.

    Raises:
        OSError: it cannot be read, or not be written to disk.
    """
    with open(path, "rb", buffering=0) as file:
        digest = hashlib.file_digest(file, _xxh3()).hexdigest()  # type: ignore[arg-type]
        if to_disk:
            os.fsync(file.fileno())
    return digest


def file_digests(paths: Iterable[str | Path], *, to_disk: bool = False) -> dict[str, str]:
    """Digests of files by their paths, several read at a time; arguments and errors as those of `file_digest`."""
    digests: dict[str, Future[str]] = {str(path): Future() for path in paths}
    waiting = deque(digests)

    def read() -> None:
        with suppress(IndexError):
            while True:
                name = waiting.popleft()
                try:
                    digests[name].set_result(file_digest(name, to_disk=to_disk))
                except BaseException as error:
                    digests[name].set_exception(error)

    # Not with an executor: its threads hold up the end of the program.
    for _ in range(min(_THREADS, len(digests))):
        threading.Thread(target=read, name="digests", daemon=True).start()
    try:
        return {name: digest.result() for name, digest in digests.items()}
    finally:
        waiting.clear()


def data_digests(files: str | Iterable[str]) -> Mapping[str, str]:
    """Digests of a config's data files, by path as the config has it.

    Raises:
        OSError: one cannot be read.
    """
    return file_digests([files] if isinstance(files, str) else files)


def _xxh3() -> Callable[..., Any]:
    import xxhash

    return xxhash.xxh3_128
