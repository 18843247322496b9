"""Dispatch, then collect: nothing is lost, doubled, reordered or sent where it does not belong, whatever the mesh.

No processes here: calls are dispatched, "run" and collected in this one (`test_meshes.py` has real ones).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from enginehouse.controller import DataLayout, Dispatch, DispatchError, DistributedBatch, PerRank, Same
from enginehouse.controller.dispatch import Balanced, Dealt, resolve_mode, restore_order
from enginehouse.controller.launchers.encoding import STORE_BYTES, encode
from enginehouse.controller.registration import CallSpec
from enginehouse.controller.shards import Shard, keep_back
from enginehouse.data import Batch, Ragged, balance
from enginehouse.engines.mesh import Mesh

MOST_RANKS = 16
ROW_AXES = ("dp", "dp_replicate", "dp_shard")
MODEL_AXES = ("tp", "pp", "cp", "ep")
SIZES = [
    sizes
    for axes in (1, 2, 3, 4)
    for sizes in itertools.product(range(1, MOST_RANKS + 1), repeat=axes)
    if math.prod(sizes) <= MOST_RANKS
]
"""All sizes that up to four axes can have."""


@dataclass
class StandIn:
    """Stands in for a `WorkerGroup`: modes read its size, layout and name, and nothing else.

    Attributes:
        meshes: each rank's mesh, or None.
        received: for each rank the arguments of its calls, in order.
    """

    meshes: list[Mesh | None]
    name: str = "stand-in"
    received: dict[int, list[tuple[tuple[Any, ...], dict[str, Any]]]] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        return len(self.meshes)

    @property
    def layout(self) -> DataLayout:
        return DataLayout.of(self.meshes, self.name)

    def call(self, spec: CallSpec, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What a group does with a call, with `work(rank, *args, **kwargs)` in the place of a worker's method."""
        mode = resolve_mode(spec)
        calls = mode.dispatch(self, *args, **kwargs)
        assert len(calls) == self.world_size
        called = [rank for rank, call in enumerate(calls) if call is not None]
        answering = list(mode.returning(self)) if mode.returning else called
        outputs: list[Any] = [None] * self.world_size
        for rank in called:
            own_args, own_kwargs = ([_read(value) for value in calls[rank][0]], calls[rank][1])
            own_kwargs = {name: _read(value) for name, value in own_kwargs.items()}
            self.received.setdefault(rank, []).append((tuple(own_args), own_kwargs))
            output = work(rank, *own_args, **own_kwargs)
            if rank in answering:  # what other ranks return never leaves them
                outputs[rank] = _left_there(output, rank) if mode.keeps_back else output
        result = mode.collect(self, outputs, answering)
        if not isinstance(calls, Dealt) or not mode.joins:
            return result
        return restore_order(result, [outputs[rank] for rank in answering], calls.shards)


def _read(value: Any) -> Any:
    """What a worker makes of an argument that stands for rows elsewhere."""
    return value.fetch() if isinstance(value, DistributedBatch) else value


def _left_there(output: Any, rank: int) -> Any:
    told, rows = keep_back(output)
    return told if rows is None else Shard(rows, told, f"rank {rank}")


def whole(result: Any) -> Batch:
    return result.fetch() if isinstance(result, DistributedBatch) else result


@dataclass(frozen=True)
class Drawn:
    """A mesh as drawn, and what follows from it, worked out from coordinates alone.

    Attributes:
        sizes: size of each axis, outermost first.
        output: coordinates of the rank that answers, where not zero.
        replicas: the ranks of each data shard, in the order of the shards.
        answering: the rank that answers for each.
    """

    sizes: dict[str, int]
    output: dict[str, int]
    replicas: list[list[int]]
    answering: list[int]

    @classmethod
    def of(cls, sizes: dict[str, int], output: dict[str, int]) -> Drawn:
        replicas: dict[tuple[int, ...], list[int]] = {}
        answering: dict[tuple[int, ...], int] = {}
        for rank, numbers in enumerate(itertools.product(*map(range, sizes.values()))):
            place = dict(zip(sizes, numbers))
            shard = tuple(place[axis] for axis in sizes if axis in ROW_AXES)
            replicas.setdefault(shard, []).append(rank)
            if all(place[axis] == output.get(axis, 0) for axis in sizes if axis in MODEL_AXES):
                answering[shard] = rank
        return cls(sizes, output, list(replicas.values()), [answering[shard] for shard in replicas])

    def group(self) -> StandIn:
        ranks = range(math.prod(self.sizes.values()))
        return StandIn([Mesh.of(self.sizes, rank, self.output) for rank in ranks])


@st.composite
def meshes(draw: st.DrawFn) -> Drawn:
    """Some axes in any order, up to 16 ranks, with any coordinates of the rank that answers."""
    sizes = dict(zip(draw(st.permutations(ROW_AXES + MODEL_AXES)), draw(st.sampled_from(SIZES))))
    output = {
        axis: draw(st.integers(0, size - 1))
        for axis, size in sizes.items()
        if axis in MODEL_AXES and draw(st.booleans())
    }
    return Drawn.of(sizes, output)


row_strategy = st.fixed_dictionaries(
    {
        "ids": st.lists(st.integers(0, 99), max_size=6),
        "note": st.one_of(st.none(), st.text(max_size=2), st.integers(), st.lists(st.integers(), max_size=2)),
    }
)
KINDS = ("reward", "vector", "ids", "logprobs", "note")


@st.composite
def batches(draw: st.DrawFn, more: tuple[str, ...] = ()) -> Batch:
    """Columns of all kinds, or some of them; `number` says which row a row is. No rows at all are also a batch."""
    rows = draw(st.lists(row_strategy, max_size=20))
    ids = Ragged.from_list([row["ids"] for row in rows])
    columns = {
        "reward": torch.arange(len(rows), dtype=torch.float32) / 7,
        "vector": torch.arange(3 * len(rows), dtype=torch.int16).reshape(len(rows), 3),
        "ids": ids,
        "logprobs": ids.like(ids.values.to(torch.bfloat16)),
        "note": [row["note"] for row in rows],
    }
    chosen = draw(st.lists(st.sampled_from(KINDS), unique=True))
    columns = {name: columns[name] for name in dict.fromkeys([*chosen, *more])}
    return Batch({"number": torch.arange(len(rows)), **columns})


def numbers(batch: Batch) -> list[int]:
    return batch.tensor("number").tolist()


def identity(rank: int, value: Any, **_: Any) -> Any:
    return value


# Data parallel


@given(meshes(), batches())
def test_a_dp_identity_gives_the_batch_back(mesh: Drawn, batch: Batch) -> None:
    for collect in (None, "concat", "distributed"):
        result = whole(mesh.group().call(CallSpec("dp", collect), identity, batch))
        assert result.equal(batch)
        assert result.columns == batch.columns


@given(meshes(), batches())
def test_every_row_reaches_all_ranks_of_one_replica_and_no_others(mesh: Drawn, batch: Batch) -> None:
    group = mesh.group()
    group.call(CallSpec("dp"), identity, batch)
    assert sorted(group.received) == list(range(group.world_size)), "every rank is called, with or without rows"
    given_rows = {rank: numbers(calls[0][0][0]) for rank, calls in group.received.items()}
    shards = []
    for ranks in mesh.replicas:
        assert len({tuple(given_rows[rank]) for rank in ranks}) == 1, "ranks of one replica see the same rows"
        shards.append(given_rows[ranks[0]])
    assert list(itertools.chain(*shards)) == numbers(batch), "shards are consecutive rows, in the replicas' order"
    sizes = [len(shard) for shard in shards]
    assert max(sizes) - min(sizes) <= 1


@given(meshes(), batches())
def test_rows_reach_the_ranks_whole(mesh: Drawn, batch: Batch) -> None:
    group = mesh.group()
    group.call(CallSpec("dp"), identity, batch)
    for calls in group.received.values():
        received = calls[0][0][0]
        assert received.equal(batch.take(numbers(received)))


@given(meshes(), batches())
def test_results_come_from_the_output_ranks_in_the_order_of_their_shards(mesh: Drawn, batch: Batch) -> None:
    group = mesh.group()
    answers = group.call(CallSpec("dp", "list"), lambda rank, rows: (rank, len(rows)), batch)
    assert [rank for rank, _ in answers] == mesh.answering
    assert sum(rows for _, rows in answers) == len(batch)


@given(meshes(), batches())
def test_ranks_of_a_replica_are_given_one_object(mesh: Drawn, batch: Batch) -> None:
    calls = resolve_mode(CallSpec("dp")).dispatch(mesh.group(), batch)
    for ranks in mesh.replicas:
        assert len({id(calls[rank][0][0]) for rank in ranks}) == 1


@given(meshes(), st.booleans())
@settings(max_examples=30)
def test_a_large_shard_is_put_once_for_all_ranks_of_its_replica(mesh: Drawn, distributed: bool) -> None:
    """A batch's rows, or the columns that were added to a distributed one here."""
    rows = len(mesh.replicas) * STORE_BYTES // 8
    batch: Any = Batch({"number": torch.arange(rows)})
    if distributed:
        batch = DistributedBatch.of([batch]).with_columns(added=torch.zeros(rows, dtype=torch.int64))
    calls = resolve_mode(CallSpec("dp")).dispatch(mesh.group(), batch)
    with mock.patch("ray.put", side_effect=itertools.count()) as put:
        encoded = encode("role", "method", calls, {})
    model_parallel = len(mesh.replicas[0]) > 1
    assert put.call_count == model_parallel * len(mesh.replicas)
    beside = [list(parts[1:]) for parts in encoded]
    assert all(len(parts) == model_parallel for parts in beside), "one reference beside the call, or the rows in it"
    for ranks in mesh.replicas:
        assert all(beside[rank] == beside[ranks[0]] for rank in ranks)


FORMS: dict[str, Callable[[Batch], Any]] = {
    "a list": lambda rows: numbers(rows),
    "a tuple": lambda rows: tuple(numbers(rows)),
    "a tensor": lambda rows: rows["number"],
    "an array": lambda rows: rows["number"].numpy(),
    "a batch": lambda rows: rows.select(["number"]),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@given(meshes(), batches())
@settings(max_examples=40)
def test_one_entry_a_row_comes_back_in_the_rows_order_in_any_form(form, mesh: Drawn, batch: Batch) -> None:
    result = whole(mesh.group().call(CallSpec("dp"), lambda rank, rows: form(rows), batch))
    wanted = form(batch)
    assert type(result) is type(wanted)
    if isinstance(result, Batch):
        assert result.equal(wanted)
    else:
        assert list(result) == list(wanted)


@pytest.mark.parametrize("make", [torch.tensor, np.array], ids=["tensors", "arrays"])
@given(meshes(), batches())
@settings(max_examples=40)
def test_a_shard_without_rows_does_not_change_the_type_of_the_others(make, mesh: Drawn, batch: Batch) -> None:
    """An empty list becomes an array of floats, in which large integers are other integers."""
    large = 2**60 + 1
    result = mesh.group().call(CallSpec("dp"), lambda rank, rows: make([large + row for row in numbers(rows)]), batch)
    assert result.tolist() == [large + row for row in numbers(batch)]


def test_arrays_of_different_types_are_not_joined() -> None:
    group = StandIn([None] * 2)
    with pytest.raises(DispatchError, match=r"stand-in.*rank 0: torch.float32, rank 1: torch.int64"):
        group.call(CallSpec("dp"), lambda rank, rows: torch.ones(1) if rank == 0 else torch.arange(2), Batch({}))


@given(meshes(), batches())
def test_nothing_from_every_rank_is_nothing(mesh: Drawn, batch: Batch) -> None:
    assert mesh.group().call(CallSpec("dp"), lambda rank, rows: None, batch) is None


@given(meshes(), batches(), st.data())
def test_several_batches_are_cut_alike_and_the_rest_goes_to_all(mesh: Drawn, batch: Batch, data: st.DataObject) -> None:
    group = mesh.group()
    other = batch.select(["number"]).with_columns(half=batch["number"] * 0.5)
    aside = data.draw(st.sampled_from([3, "text", [1, 2], torch.arange(4), None]))

    def join(rank: int, rows: Batch, setting: Any, *, second: Batch, flag: Any) -> Batch:
        assert numbers(rows) == numbers(second)
        assert setting is aside
        assert flag is aside
        return rows.with_columns(half=second["half"])

    result = group.call(CallSpec("dp"), join, batch, aside, second=other, flag=aside)
    assert whole(result).equal(batch.with_columns(half=other["half"]))


@given(meshes(), meshes(), batches())
def test_what_one_mesh_made_is_dealt_over_another(mesh: Drawn, another: Drawn, batch: Batch) -> None:
    """The result of a `dp` call goes on as it is, and rows change ranks only because the number of shards does."""
    made = mesh.group().call(CallSpec("dp"), identity, batch)
    group = another.group()
    assert whole(group.call(CallSpec("dp"), identity, made)).equal(batch)
    directly = another.group()
    directly.call(CallSpec("dp"), identity, batch)
    for rank, calls in directly.received.items():
        assert group.received[rank][0][0][0].equal(calls[0][0][0])


# Dealt by tokens


@given(meshes(), batches(more=("ids",)))
def test_a_balanced_identity_gives_the_batch_back_in_the_order_given(mesh: Drawn, batch: Batch) -> None:
    for collect in (None, "concat", "distributed"):
        result = mesh.group().call(CallSpec("dp", collect), identity, Balanced(batch, by="ids"))
        assert whole(result).equal(batch)


@given(meshes(), batches(more=("ids",)))
def test_balanced_rows_reach_all_ranks_of_one_replica_and_no_others(mesh: Drawn, batch: Batch) -> None:
    group = mesh.group()
    group.call(CallSpec("dp"), identity, Balanced(batch, by="ids"), second=batch)
    shards = []
    for ranks in mesh.replicas:
        seen = {
            tuple(numbers(rows)) for rank in ranks for rows in (group.received[rank][0][0][0], *_second(group, rank))
        }
        assert len(seen) == 1, "ranks of one replica, and all batches of a call, see the same rows"
        shards.append(seen.pop())
    assert sorted(itertools.chain(*shards)) == numbers(batch)
    lengths = batch.lengths("ids")
    tokens = [int(lengths[list(shard)].sum()) for shard in shards]
    assert max(tokens) - min(tokens) <= max(lengths.tolist(), default=0)


def _second(group: StandIn, rank: int) -> list[Batch]:
    return [group.received[rank][0][1]["second"]]


@given(meshes(), meshes(), batches(more=("ids",)))
def test_a_distributed_batch_is_dealt_by_tokens_like_the_batch(mesh: Drawn, another: Drawn, batch: Batch) -> None:
    made = mesh.group().call(CallSpec("dp"), identity, batch)
    group, directly = another.group(), another.group()
    assert whole(group.call(CallSpec("dp"), identity, Balanced(made, by="ids"))).equal(batch)
    directly.call(CallSpec("dp"), identity, Balanced(batch, by="ids"))
    for rank, calls in directly.received.items():
        assert group.received[rank][0][0][0].equal(calls[0][0][0])


@pytest.mark.slow
@given(meshes(), batches(more=("ids",)))
def test_what_is_not_one_entry_a_row_is_left_as_the_shards_gave_it(mesh: Drawn, batch: Batch) -> None:
    """Also where there happen to be as many results as rows."""
    plan = balance(batch.lengths("ids"), len(mesh.replicas))
    own = [part.tolist() for part in plan]

    def call(collect: Any, work: Callable[[Batch], Any]) -> Any:
        return mesh.group().call(CallSpec("dp", collect), lambda rank, rows: work(rows), Balanced(batch, by="ids"))

    assert call("list", numbers) == own
    assert call("first", numbers) == own[0]
    assert call(lambda group, outputs: [outputs[rank] for rank in mesh.answering], numbers) == own
    one_a_shard = call("concat", lambda rows: [numbers(rows)])
    assert one_a_shard == ([[row] for row in numbers(batch)] if all(len(rows) == 1 for rows in own) else own)


def test_as_many_entries_as_rows_are_not_taken_for_one_a_row() -> None:
    """Two of each of three shards, which have one, two and three rows."""
    lengths = [10, 5, 5, 3, 3, 3]
    ids = Ragged.from_lengths(torch.arange(29), lengths)
    batch = Batch({"number": torch.arange(6), "ids": ids})

    def work(rank: int, rows: Batch) -> list[list[int]]:
        return [numbers(rows)] * 2

    result = StandIn([None] * 3).call(CallSpec("dp"), work, Balanced(batch, by="ids"))
    own = [part.tolist() for part in balance(lengths, 3)]
    assert sorted(map(len, own)) == [1, 2, 3]
    assert result == [rows for rows in own for _ in range(2)]


# The other modes, which know no mesh


@given(meshes(), batches())
def test_one_to_all_gives_every_rank_the_whole_batch_and_all_results(mesh: Drawn, batch: Batch) -> None:
    group = mesh.group()
    results = group.call(CallSpec("one_to_all"), lambda rank, rows: (rank, rows), batch)
    assert [rank for rank, _ in results] == list(range(group.world_size))
    assert all(rows is batch for _, rows in results)
    assert group.call(CallSpec("one_to_all", "first"), identity, batch) is batch
    joined = group.call(CallSpec("one_to_all", "concat"), identity, batch)
    assert numbers(joined) == numbers(batch) * group.world_size


@given(meshes(), batches())
def test_rank_zero_is_the_only_one_called(mesh: Drawn, batch: Batch) -> None:
    group = mesh.group()
    assert group.call(CallSpec("rank_zero"), identity, batch, flag=1) is batch
    assert group.received == {0: [((batch,), {"flag": 1})]}


@given(meshes(), batches(), st.booleans())
def test_all_to_all_gives_each_rank_its_own_and_the_results_in_order(mesh: Drawn, batch: Batch, named: bool) -> None:
    group = mesh.group()
    parts = batch.split(group.world_size)
    entries = PerRank(parts) if named else parts
    results = group.call(CallSpec("all_to_all"), identity, entries, tag=list(range(group.world_size)), all=Same(batch))
    assert all(result is part for result, part in zip(results, parts, strict=True))
    assert Batch.concat(results).equal(batch)
    for rank, calls in group.received.items():
        assert calls == [((parts[rank],), {"tag": rank, "all": batch})]


@given(st.integers(1, MOST_RANKS), batches())
def test_without_meshes_every_rank_is_a_replica_that_answers(ranks: int, batch: Batch) -> None:
    group = StandIn([None] * ranks)
    assert whole(group.call(CallSpec("dp"), identity, batch)).equal(batch)
    seen = [numbers(group.received[rank][0][0][0]) for rank in range(ranks)]
    assert seen == [part.tolist() for part in np.array_split(np.arange(len(batch)), ranks)]


def test_every_built_in_mode_has_its_properties_here() -> None:
    assert set(Dispatch) == {Dispatch.ONE_TO_ALL, Dispatch.ALL_TO_ALL, Dispatch.RANK_ZERO, Dispatch.DP}
