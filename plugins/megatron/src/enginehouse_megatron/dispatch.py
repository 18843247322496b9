"""The dispatch mode `megatron_compute`, and groups that know Megatron's axes. Light: a controller imports it.

class MLP(Worker):
    def __init__(self): ...           # makes the process groups, and `self.mesh`

    @register("megatron_compute")
    def forward(self, x): ...         # on every rank; x is the entry of its data-parallel rank

group = MegatronWorkerGroup(pool, WorkerSpec(MLP))
outputs = group.forward([x] * group.dp_size)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from enginehouse.controller import WorkerGroup
from enginehouse.controller.dispatch import Call, Same
from enginehouse.controller.errors import DispatchError
from enginehouse_megatron.axes import CONTEXT, PIPELINE, TENSOR


def megatron_compute(group: WorkerGroup, *args: Any, **kwargs: Any) -> list[Call | None]:
    """One entry of each argument for each data-parallel rank; all ranks that share its rows get the same.

    Results come from the rank that answers for each: the first of those that split matrices and sequences, on the last
    pipeline stage (`Mesh.is_output_rank`).

    Raises:
        DispatchError: an argument is not a list with an entry for each data-parallel rank, or the meshes do not fit.
    """
    layout = group.layout
    spread = [_entries(value, f"argument {index}", layout.shards) for index, value in enumerate(args)]
    named = {name: _entries(value, f"argument {name!r}", layout.shards) for name, value in kwargs.items()}
    return [
        (tuple(values[shard] for values in spread), {name: values[shard] for name, values in named.items()})
        for shard in layout.shard_of
    ]


def _entries(value: Any, what: str, shards: int) -> Sequence[Any]:
    if isinstance(value, Same):
        return [value.value] * shards
    if not isinstance(value, (list, tuple)):
        raise DispatchError(
            f"{what} of a megatron_compute call is a list with one entry for each of the {shards} data-parallel "
            f"rank(s), not {type(value).__name__}; wrap a value for every rank in Same(value)"
        )
    if len(value) != shards:
        raise DispatchError(
            f"{what} of a megatron_compute call has {len(value)} entries for {shards} data-parallel rank(s)"
        )
    return value


class MegatronWorkerGroup(WorkerGroup):
    """A `WorkerGroup` whose workers' meshes have the axes of `enginehouse_megatron.axes`."""

    @property
    def tp_size(self) -> int:
        """Ranks that split a matrix."""
        return self._size(TENSOR)

    @property
    def pp_size(self) -> int:
        """Pipeline stages."""
        return self._size(PIPELINE)

    @property
    def cp_size(self) -> int:
        """Ranks that split a sequence."""
        return self._size(CONTEXT)

    @property
    def dp_size(self) -> int:
        """Data-parallel ranks: entries of an argument of a `megatron_compute` call."""
        return self.layout.shards

    def _size(self, axis: str) -> int:
        mesh = self.meshes[0]
        return 1 if mesh is None else mesh.size(axis)
