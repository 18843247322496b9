"""The data that all sides of the dispatch benchmark move. It needs only numpy; each side wraps it in its own type."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

ROWS = 1024
ROWS_AT_ONCE = 16


def columns(megabytes: float, rows: int = ROWS) -> dict[str, np.ndarray]:
    """Return token ids (int32) and logprobs (float32), both `(rows, tokens)`, of `megabytes` million bytes together."""
    tokens = max(round(megabytes * 1e6 / (2 * 4 * rows)), 1)
    ids = np.arange(rows * tokens, dtype=np.int32).reshape(rows, tokens)
    logprobs = ids.astype(np.float32)
    logprobs *= -1e-9
    return {"input_ids": ids, "logprobs": logprobs}


def check_same(sent: Mapping[str, np.ndarray], received: Mapping[str, np.ndarray]) -> None:
    """Raise AssertionError if received data differ from sent data.

    They are compared a few rows at a time, because the memory of this process is watched.
    """
    assert sent.keys() == received.keys(), f"columns {list(received)} came back of {list(sent)}"
    for name, array in sent.items():
        assert array.shape == received[name].shape, f"column {name!r} came back with shape {received[name].shape}"
        for first in range(0, len(array), ROWS_AT_ONCE):
            rows = slice(first, first + ROWS_AT_ONCE)
            assert np.array_equal(array[rows], received[name][rows]), f"column {name!r} came back changed"
