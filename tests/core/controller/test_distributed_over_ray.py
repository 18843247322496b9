"""Results stay where they were made, and go from worker to worker."""

import gc
import os
import signal
import weakref

import controller_shards
import pytest
import torch
from controller_shards import Writer

from enginehouse.controller import (
    Balanced,
    DispatchError,
    DistributedBatch,
    RemoteError,
    Same,
    WorkerDied,
    WorkerGroup,
    WorkerSpec,
)
from enginehouse.data import Batch, Ragged

pytestmark = pytest.mark.slow


def prompts(rows: int = 5) -> Batch:
    return Batch({"number": torch.arange(rows)})


@pytest.fixture
def writers(standing) -> WorkerGroup:
    """Two ranks, each its own data shard."""
    return standing(Writer, name="writers")


@pytest.fixture
def readers(standing) -> WorkerGroup:
    """Four ranks: one data shard of two model-parallel ranks each, or as the test sets it."""
    group = standing(Writer, name="readers", processes=4)
    group.execute_all("lie_on", {"dp": 2, "tp": 2})
    group.refresh_meshes()
    return group


@pytest.mark.parametrize("mesh", [{"dp": 2, "tp": 2}, {"dp": 4}, {"dp": 1, "tp": 4}])
def test_rows_go_from_group_to_group_without_passing_the_controller(writers, readers, mesh):
    readers.execute_all("lie_on", mesh)
    readers.refresh_meshes()
    made = writers.write(prompts())
    assert isinstance(made, DistributedBatch)
    back = writers.same(readers.same(made))
    assert back.column("number").tolist() == [0, 1, 2, 3, 4]
    assert back.lengths("ids").tolist() == [1, 2, 3, 4, 5]
    assert controller_shards.read_in_this_process == [], "the controller read rows"
    assert all(names for names in readers.execute_all("read_here"))
    assert back.fetch(["number", "ids"]).equal(made.fetch(["number", "ids"]))
    controller_shards.read_in_this_process.clear()


def test_every_rank_of_another_kind_of_call_gets_all_rows(writers, readers):
    made = writers.write(prompts())
    assert readers.count(made) == [5, 5, 5, 5]
    assert readers.count(made.take([3, 0])) == [2, 2, 2, 2]


def test_rows_chosen_and_columns_added_at_the_controller_travel_along(writers, readers):
    made = writers.write(prompts())
    chosen = made.with_columns(advantage=made.column("number") * 2.0).take([4, 0, 3, 0])
    arrived = readers.same(chosen).fetch(["number", "advantage", "ids"])
    assert arrived["number"].tolist() == [4, 0, 3, 0]
    assert arrived["advantage"].tolist() == [8.0, 0.0, 6.0, 0.0]
    assert [row.tolist() for row in arrived["ids"]] == [[4] * 5, [0], [3] * 4, [0]]


def test_the_future_of_a_distributed_batch_is_as_good_as_the_batch(writers, readers):
    coming = writers.same_later(prompts(3))
    assert readers.same_later(coming).result().column("number").tolist() == [0, 1, 2]
    assert readers.count(coming) == [3, 3, 3, 3]


def test_rows_are_dealt_by_tokens_and_come_back_in_order(writers):
    batch = Batch(
        {"number": torch.arange(6), "ids": Ragged.from_list([[1] * length for length in (10, 1, 1, 1, 2, 5)])}
    )
    dealt = writers.numbers_and_tokens(Balanced(batch, by="ids"))
    assert [tokens for _, tokens in dealt] == [10, 10]
    assert sorted(number for numbers, _ in dealt for number in numbers) == list(range(6))
    assert writers.same(Balanced(batch, by="ids")).fetch().equal(batch)
    again = writers.same(Balanced(writers.same_later(batch), by="ids"))
    assert again.fetch().equal(batch)


def test_all_batches_of_a_call_are_dealt_alike_and_only_one_says_how(writers):
    batch = writers.write(prompts())
    with pytest.raises(DispatchError, match="one argument of a call can be Balanced"):
        writers.same(Balanced(batch, "ids"), Balanced(batch, "ids"))
    with pytest.raises(DispatchError, match="must wrap a batch, not int"):
        writers.same(Balanced(3, "ids"))
    with pytest.raises(TypeError, match="'number' is dense"):
        writers.same(Balanced(batch, "number"))


def test_an_exception_is_told_as_ever_when_results_stay(writers):
    with pytest.raises(RemoteError, match=r"rank 1.*no row 4, please"):
        writers.fail_on_the_last_row(prompts())
    assert writers.same(prompts()).column("number").tolist() == [0, 1, 2, 3, 4]


def test_rows_outlive_the_processes_that_made_them(launch, readers):
    group = launch(Writer, name="short-lived")
    made = group.write(prompts())
    os.kill(group.pids[0], signal.SIGKILL)
    with pytest.raises(WorkerDied):
        group.same(prompts())
    group.shutdown()
    assert made.fetch(["padding"])["padding"].shape == (5, 50_000)
    assert readers.count(made) == [5, 5, 5, 5]


def test_what_a_rank_says_beside_a_batch_comes_and_the_batch_stays(writers, readers):
    controller_shards.read_in_this_process.clear()
    told, made = writers.execute_rank(1, "tell_and_write", prompts())
    assert told == "told"
    assert isinstance(made, DistributedBatch)
    assert made.lengths("ids").tolist() == [1, 2, 3, 4, 5]
    assert readers.count(made) == [5, 5, 5, 5]
    assert controller_shards.read_in_this_process == [], "the controller read rows"


def test_a_group_in_this_process_does_the_same():
    with WorkerGroup(None, WorkerSpec(Writer), launcher="inline") as group:
        made = group.write(prompts())
        assert isinstance(made, DistributedBatch)
        assert group.same(made.take([2, 1])).column("number").tolist() == [2, 1]
        assert group.count(group.same_later(made)) == [5]
        told, alike = group.execute_rank(0, "tell_and_write", prompts())
        assert told == "told"
        assert alike.fetch(["number", "ids"]).equal(made.fetch(["number", "ids"]))
        assert group.same(Balanced(made, by="ids")).column("number").tolist() == [0, 1, 2, 3, 4]


def test_balanced_is_refused_where_nothing_is_dealt(writers):
    with pytest.raises(DispatchError, match=r"count got a Balanced batch, which only calls of mode 'dp' accept"):
        writers.count(Balanced(prompts(), by="ids"))


def test_several_rows_for_each_row_given_come_back_in_blocks(writers):
    batch = Batch({"number": torch.arange(4), "ids": Ragged.from_list([[1] * n for n in (9, 1, 1, 8)])})
    assert writers.answer(Balanced(batch, by="ids"), 2).column("number").tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    with pytest.raises(DispatchError, match=r"4 rows was split into \[2, 2\] rows, but came back as \[0, 1\] rows"):
        writers.drop_rows(Balanced(batch, by="ids"))


def test_a_value_for_every_rank_is_given_as_it_is(writers):
    with pytest.raises(DispatchError, match="got a Same, which only calls of mode 'all_to_all' accept"):
        writers.answer(prompts(), Same(2))


def test_shards_of_different_dtypes_are_refused_where_they_were_made(writers):
    with pytest.raises(DispatchError, match=r"'number' is dense int64 from writers rank 0.*float32 from writers"):
        writers.other_dtype_on_rank_one(prompts())


def test_a_shard_without_rows_may_have_any_dtype(writers):
    made = writers.other_dtype_on_rank_one(prompts(1))
    assert made.fetch()["number"].tolist() == [0]


def test_a_settled_future_holds_neither_arguments_nor_results_of_others(writers):
    batch = prompts()
    seen = weakref.ref(batch["number"])
    future = writers.same_later(batch)
    assert len(future.result()) == 5
    del batch
    gc.collect()
    assert seen() is None


def test_rows_that_are_here_travel_without_the_rest_of_their_batch(writers):
    here = DistributedBatch.of([Batch({"number": torch.arange(1000), "large": torch.zeros(1000, 1000)})])
    part = here.select(["number"]).slice(0, 10)
    assert part.assembly().nbytes < 1000
    assert writers.same(part).column("number").tolist() == list(range(10))


def test_the_deadline_of_a_call_counts_for_all_futures_among_its_arguments(writers, readers):
    stuck = writers.call("never", prompts(), timeout=60, blocking=False)
    with pytest.raises(DispatchError, match="was not sent"):
        readers.call("pair", stuck, stuck, timeout=0.1)
    assert readers.broken is None
    with pytest.raises(DispatchError, match="positive number of seconds, not 0"):
        readers.call("count", 1, timeout=0)
    writers.execute_all("wake")
