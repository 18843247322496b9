"""One rank of an engine under test: the worker that runs a check's acts, and the object that an act gets."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from enginehouse.controller import Worker, register
from enginehouse.controller.launchers.rendezvous import open_store
from enginehouse.data import Batch
from enginehouse.engines.model import ModelSpec, ProcessContext
from enginehouse.plugin import Layout, TrainBackend, resolve
from enginehouse_testing.check import Check, Seen
from enginehouse_testing.problem import uneven


@dataclass(slots=True)
class Rank:
    """Builds engines of the backend under test for an act.

    Attributes:
        models: directories of the tiny models, by name.
        directory: folder that is empty when a case's first act begins; all ranks and acts of the case share it.
        dtype: dtype of engines, unless an act says otherwise.
        place: data shard, number of data shards, and True on an output rank, for the engine built last.
    """

    record: TrainBackend
    layout: Layout
    context: ProcessContext
    models: Mapping[str, str]
    directory: str
    dtype: Any = "float32"
    place: tuple[int, int, bool] = field(default=(0, 1, True), init=False)

    @contextlib.contextmanager
    def engine(
        self, model: str = "tied", *, head: Any = "causal_lm", dtype: Any = None, **options: Any
    ) -> Iterator[Any]:
        """Build a new engine, and shut it down afterwards.

        Args:
            model: name of a tiny model, or a directory.
            head, dtype: as in `ModelSpec`.
            options: options that every backend has; the layout's options override them.
        """
        self._new_rendezvous()
        checked = resolve(self.record.options)(**{"tokens_per_microbatch": 40, **options, **self.layout.options})
        engine = resolve(self.record.engine)()
        spec = ModelSpec(path=self.models.get(model, model), head=head, dtype=dtype or self.dtype)
        engine.setup(spec, checked, self.context)
        self.place = (engine.mesh.dp_rank, engine.mesh.dp_size, engine.mesh.is_output_rank)
        try:
            yield engine
            self.meet()
        finally:
            engine.shutdown()

    def shard(self, engine: Any, whole: Batch, empty: bool = False, sizes: Sequence[int] | None = None) -> Batch:
        """Return this rank's rows of a batch, which is split unevenly."""
        sizes = sizes or uneven(len(whole), engine.mesh.dp_size, empty)
        return whole.split(list(sizes))[engine.mesh.dp_rank]

    def meet(self) -> None:
        """Wait for the other ranks, because a rank that ends its engine early closes the connections of the others."""
        if self.context.world_size > 1:
            number, store = next(_numbers), _group_store()
            if store.add(f"certify/{number}", 1) == self.context.world_size:
                store.set(f"certify/{number}/all", "here")
            store.wait([f"certify/{number}/all"])

    def _new_rendezvous(self) -> None:
        """Give the next engine a new store, because a used store holds the addresses of an earlier engine."""
        number, store = next(_numbers), _group_store()
        if self.context.rank == 0:
            _stores.append(open_store(os.environ["MASTER_ADDR"], STORE_SECONDS))
            store.set(f"certify/{number}/port", str(_stores[-1][1]))
        self.meet()
        os.environ["MASTER_PORT"] = store.get(f"certify/{number}/port").decode()
        del _stores[:-1]

    def path(self, name: str) -> str:
        """Return a path in the case's directory."""
        return str(Path(self.directory) / name)


STORE_SECONDS = 120.0
"""Longest wait for a rank at a store."""

_numbers = itertools.count()
_stores: list[tuple[Any, int]] = []


@functools.cache
def _group_store() -> torch.distributed.TCPStore:
    """Return the store with which the group was started. Call it before the first engine is built."""
    return torch.distributed.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)


def weights_of(engine: Any) -> dict[str, torch.Tensor]:
    """Return a copy of the whole weights on the host; collective."""
    return {name: tensor.detach().cpu().clone() for name, tensor in engine.weight_source().iter_full()}


class EngineUnderTest(Worker):
    """Runs acts, each with its own engines, in a process that keeps its rank."""

    @register
    def act(
        self, record: TrainBackend, check: Check, number: int, layout: Layout, models: dict[str, str], directory: str
    ) -> Seen:
        """Run act `number` of a check."""
        rank = Rank(record, layout, self.context, models, directory, check.dtype)
        torch.manual_seed(0)
        value = check.acts[number](rank)
        return Seen(*rank.place, value)
