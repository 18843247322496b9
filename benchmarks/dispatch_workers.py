"""Workers of the dispatch benchmark's enginehouse side. Importing this module imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from benchmarks.dispatch_columns import ROWS, columns
from enginehouse.controller import Worker, register

if TYPE_CHECKING:
    from enginehouse.data import Batch, Ragged


class Echo(Worker):
    """Answers empty calls, and returns batches unchanged."""

    @register
    def noop(self) -> None:
        return None

    @register("dp")
    def echo(self, batch: Batch) -> Batch:
        return batch


class TorchEcho(Worker):
    """Imports torch when it starts."""

    def __init__(self) -> None:
        import torch

        self.torch = torch

    @register
    def first(self) -> int:
        return self.torch.ones(1).numel()


class Maker(Worker):
    """Makes large batches out of small ones."""

    @register("dp")
    def make(self, rows: Batch, megabytes: float) -> Batch:
        """Return dense columns of `megabytes` million bytes over all shards, and each row's sum of ids."""
        from enginehouse.data import Batch

        # the shard's part of the rows, with rows as wide as those of the whole batch
        made = columns(megabytes * len(rows) / ROWS, len(rows))
        return Batch({**made, "ids_sum": made["input_ids"].sum(1, dtype=np.int64)})

    @register("dp")
    def respond(self, prompts: Batch, samples: int, tokens: int) -> Batch:
        """Make up `samples` responses per prompt, of `tokens` tokens on average, and half to one and a half times that.

        Returns:
            `response_ids` (ragged int32), `logprobs` (ragged float32), and with one number per row: `prompt` (int64,
            the prompt's number), `score` (float32) and `ids_sum` (int64), with which a reader shows that it read the
            row.
        """
        import torch

        from enginehouse.data import Batch, Ragged

        numbers = prompts["number"].numpy()
        draw = np.random.default_rng(int(numbers[0]))
        lengths = draw.integers(tokens // 2, tokens + tokens // 2, len(prompts) * samples, endpoint=True)
        offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]))
        ids = draw.integers(0, 150_000, int(offsets[-1]), dtype=np.int32)
        logprobs = -draw.random(len(ids), dtype=np.float32)
        return Batch(
            {
                "response_ids": Ragged(torch.from_numpy(ids), offsets),
                "logprobs": Ragged(torch.from_numpy(logprobs), offsets),
                "prompt": np.repeat(numbers, samples),
                "score": draw.random(len(lengths), dtype=np.float32),
                "ids_sum": row_sums(ids, offsets.numpy()),
            }
        )


class Reader(Worker):
    """Reads everything it gets, and returns a number per row."""

    @register("dp")
    def read_dense(self, batch: Batch) -> Batch:
        from enginehouse.data import Batch

        ids, logprobs = batch["input_ids"].numpy(), batch["logprobs"].numpy()
        return Batch({"ids_sum": ids.sum(1, dtype=np.int64), "loss": logprobs.sum(1)})

    @register("dp")
    def read_ragged(self, batch: Batch) -> Batch:
        from enginehouse.data import Batch

        ids: Ragged = batch["response_ids"]
        logprobs: Ragged = batch["logprobs"]
        loss = row_sums(logprobs.values.numpy(), logprobs.offsets.numpy()) * batch["advantage"].numpy()
        return Batch({"ids_sum": row_sums(ids.values.numpy(), ids.offsets.numpy()), "loss": loss})


def row_sums(values: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Return the sum of each row of a ragged column without empty rows, in int64 or float32."""
    return np.add.reduceat(values, offsets[:-1], dtype=np.int64 if values.dtype.kind == "i" else np.float32)
