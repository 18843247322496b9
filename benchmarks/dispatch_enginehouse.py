"""The dispatch benchmark with enginehouse's worker groups and batches."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator

import numpy as np
import torch

from benchmarks.dispatch_columns import ROWS, check_same, columns
from benchmarks.dispatch_side import WAKING_CALLS, serve
from benchmarks.dispatch_workers import Echo, Maker, Reader, TorchEcho
from enginehouse.controller import ResourcePool, Worker, WorkerGroup, WorkerSpec, start_ray
from enginehouse.data import Batch, Ragged

PROMPT_TOKENS = 512


class Enginehouse:
    """The commands of this side; see `benchmarks.dispatch`."""

    def __init__(self) -> None:
        self.ray = start_ray()
        self.groups = contextlib.ExitStack()
        self.group: WorkerGroup
        self.maker: WorkerGroup
        self.reader: WorkerGroup
        self.data = Batch({})

    def start_group(self, workers: int) -> None:
        self.group = self.groups.enter_context(started(Echo, workers))
        self.group.noop()

    def stop_group(self) -> None:
        self.groups.close()

    def noop(self, calls: int) -> list[float]:
        """Return the seconds of each of `calls` calls of an empty method on every worker."""
        group = self.group
        seconds = []
        for _ in range(calls):
            begun = time.perf_counter()
            group.noop()
            seconds.append(time.perf_counter() - begun)
        return seconds

    def load(self, megabytes: float) -> None:
        """Hold `megabytes` million bytes of data; 0 releases them."""
        self.data = Batch(columns(megabytes) if megabytes else {})

    def roundtrip(self) -> float:
        """Return the seconds from a batch in this process's memory to the same data in a new batch."""
        self.noop(WAKING_CALLS)
        begun = time.perf_counter()
        received = self.group.echo(self.data).fetch()
        seconds = time.perf_counter() - begun
        check_same(*({name: batch[name].numpy() for name in batch.columns} for batch in (self.data, received)))
        return seconds

    def roundtrip_in_store(self) -> float:
        """Return the seconds of the same round trip with a result that stays distributed."""
        self.noop(WAKING_CALLS)
        begun = time.perf_counter()
        received = self.group.echo(self.data)
        seconds = time.perf_counter() - begun
        assert len(received) == len(self.data)
        return seconds

    def startup(self, workers: int) -> float:
        """Return the seconds until a group with torch and its rendezvous has answered its first call."""
        begun = time.perf_counter()
        with started(TorchEcho, workers, distributed=True) as group:
            group.first()
            return time.perf_counter() - begun

    def start_two_groups(self, makers: int, readers: int) -> None:
        """Start a group that makes batches and a group that reads them, both warm."""
        self.maker = self.groups.enter_context(started(Maker, makers))
        self.reader = self.groups.enter_context(started(Reader, readers))
        self.forward(megabytes=1)
        self.large_batch(prompts=2 * makers, samples=2, tokens=16)
        gc.collect()

    def forward(self, megabytes: float) -> float:
        """Return the seconds in which one group makes `megabytes` million bytes and the other reads them all."""
        begun = time.perf_counter()
        made = self.maker.make(Batch({"row": np.arange(ROWS)}), megabytes)
        read = self.reader.read_dense(made)
        assert torch.equal(read.column("ids_sum"), made.column("ids_sum")), "rows arrived changed, or in another order"
        return time.perf_counter() - begun

    def large_batch(self, prompts: int, samples: int, tokens: int) -> dict[str, float]:
        """Let one group answer prompts, compute advantages of the scores here, and let the other group read it all.

        Returns:
            `seconds`, and the `tokens` and `megabytes` that were made.
        """
        asked = Batch(
            {
                "prompt_ids": Ragged(
                    torch.arange(prompts * PROMPT_TOKENS, dtype=torch.int32),
                    torch.arange(prompts + 1) * PROMPT_TOKENS,
                ),
                "number": torch.arange(prompts),
            }
        )
        begun = time.perf_counter()
        made = self.maker.respond(asked, samples, tokens)
        scores = made.column("score").view(prompts, samples)
        advantage = (scores - scores.mean(1, keepdim=True)).flatten()
        read = self.reader.read_ragged(made.with_columns(advantage=advantage))
        loss, ids_sum = read.column("loss"), read.column("ids_sum")
        seconds = time.perf_counter() - begun
        assert len(loss) == prompts * samples
        assert bool(loss.isfinite().all())
        assert torch.equal(ids_sum, made.column("ids_sum")), "rows arrived changed, or in another order"
        assert torch.equal(made.column("prompt"), torch.arange(prompts).repeat_interleave(samples))
        made_tokens = int(made.lengths("response_ids").sum())
        return {"seconds": seconds, "tokens": made_tokens, "megabytes": made_tokens * 8 / 1e6}

    def close(self) -> None:
        self.groups.close()
        self.ray.shutdown()


@contextlib.contextmanager
def started(worker: type[Worker], workers: int, distributed: bool = False) -> Iterator[WorkerGroup]:
    """Start a group with its own pool; both end with the block."""
    pool = ResourcePool([workers])
    try:
        spec = WorkerSpec(worker).options(distributed=distributed)
        with WorkerGroup(pool, spec, name=worker.__name__.lower()) as group:
            yield group
    finally:
        pool.shutdown()


if __name__ == "__main__":
    serve(Enginehouse())
