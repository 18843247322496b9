"""The dispatch mode `megatron_compute`, and groups that know Megatron's axes. Light, because a controller imports it.

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
    """Give each data-parallel rank, and all ranks that share its rows, its own entry of each argument.

    The result for each data-parallel rank comes from the first of its ranks that split matrices and sequences, on the
    last pipeline stage (`Mesh.is_output_rank`).

    Raises:
        DispatchError: An argument is not a list with an entry for each data-parallel rank, or the meshes do not fit.
    """
    layout = group.layout
    positional = [_get_entries(value, f"argument {index}", layout.shards) for index, value in enumerate(args)]
    named = {name: _get_entries(value, f"argument {name!r}", layout.shards) for name, value in kwargs.items()}
    return [
        (tuple(values[shard] for values in positional), {name: values[shard] for name, values in named.items()})
        for shard in layout.shard_of
    ]


def _get_entries(value: Any, what: str, shards: int) -> Sequence[Any]:
    if isinstance(value, Same):
        return [value.value] * shards
    if not isinstance(value, (list, tuple)):
        raise DispatchError(
            f"{what} of a megatron_compute call must be a list with one entry for each of the {shards} data-parallel "
            f"rank(s), not {type(value).__name__}; wrap a value for every rank in Same(value)"
        )
    if len(value) != shards:
        raise DispatchError(
            f"{what} of a megatron_compute call must have {shards} entries, one for each data-parallel rank, not "
            f"{len(value)}"
        )
    return value


class MegatronWorkerGroup(WorkerGroup):
    """A `WorkerGroup` whose workers' meshes have the axes of `enginehouse_megatron.axes`."""

    @property
    def tp_size(self) -> int:
        """Number of ranks that split a matrix."""
        return self._count_ranks(TENSOR)

    @property
    def pp_size(self) -> int:
        """Number of pipeline stages."""
        return self._count_ranks(PIPELINE)

    @property
    def cp_size(self) -> int:
        """Number of ranks that split a sequence."""
        return self._count_ranks(CONTEXT)

    @property
    def dp_size(self) -> int:
        """Number of data-parallel ranks. Each argument of a `megatron_compute` call must have as many entries."""
        return self.layout.shards

    def _count_ranks(self, axis: str) -> int:
        mesh = self.meshes[0]
        return 1 if mesh is None else mesh.size(axis)
