"""Computes digests of files, which show whether a file has changed.

XXH3 with 128 bits finds accidental changes at the speed of memory. It does not protect against forgery.
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
"""Maximum number of files that are read at the same time; the hash function releases the GIL."""
MODEL_FILES = frozenset({".safetensors", ".bin", ".pt", ".json", ".jinja", ".model", ".txt", ".py"})
"""Suffixes of the model files that engines and tokenizers read."""
MODEL_PARTS, PART_BYTES = 64, 1 << 16
"""The number of parts of a large file that are read, and the size of each part in bytes."""


def text_digest(text: str) -> str:
    """Return the hexadecimal digest of a text."""
    return _load_xxh3()(text.encode("utf-8", "surrogatepass")).hexdigest()


def file_digest(path: str | Path, *, to_disk: bool = False) -> str:
    """Return the hexadecimal digest of a file's bytes.

    Args:
        to_disk: also fsync the file.

    Raises:
        OSError: the file cannot be read, or fsync fails.
    """
    with open(path, "rb", buffering=0) as file:
        digest = hashlib.file_digest(file, _load_xxh3()).hexdigest()  # type: ignore[arg-type]
        if to_disk:
            os.fsync(file.fileno())
    return digest


def file_digests(paths: Iterable[str | Path], *, to_disk: bool = False) -> dict[str, str]:
    """Return the `file_digest` of each file by its path; several files are read at a time."""
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

    # The threads of an executor would hold up the end of the program.
    for _ in range(min(_THREADS, len(digests))):
        threading.Thread(target=read, name="digests", daemon=True).start()
    try:
        return {name: digest.result() for name, digest in digests.items()}
    finally:
        waiting.clear()


def data_digests(files: str | Iterable[str]) -> Mapping[str, str]:
    """Return the digests of data files, by the paths in the config.

    Raises:
        OSError: a file cannot be read.
    """
    return file_digests([files] if isinstance(files, str) else files)


def model_digest(directory: str | Path) -> str:
    """Return the hexadecimal digest of a model's directory.

    It covers the names and sizes of the files, the whole content of small files, and evenly spread parts of large
    files. Therefore it is cheap to compute even for a model of 16 GB. Training changes the digest, but a change of a
    single value may not.

    Raises:
        OSError: a file cannot be read.
    """
    digest = _load_xxh3()()
    for path in sorted(Path(directory).iterdir()):
        if path.suffix not in MODEL_FILES or path.name.startswith(".") or not path.is_file():
            continue
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(f"{path.name} {size}\n".encode())
            whole = size <= MODEL_PARTS * PART_BYTES
            for part in range(MODEL_PARTS):
                begin = part * PART_BYTES if whole else part * (size - PART_BYTES) // (MODEL_PARTS - 1)
                digest.update(os.pread(file.fileno(), PART_BYTES, begin))
    return digest.hexdigest()


def _load_xxh3() -> Callable[..., Any]:
    import xxhash

    return xxhash.xxh3_128
