"""What the modes make of arguments and results, without processes."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from enginehouse.controller import DataLayout, Dispatch, DispatchError, PerRank, Same
from enginehouse.controller.collect import collect
from enginehouse.controller.dispatch import all_to_all, dp, is_splittable, one_to_all, rank_zero, resolve_mode
from enginehouse.controller.launchers.encoding import payload_bytes
from enginehouse.controller.registration import CallSpec
from enginehouse.data import Batch
from enginehouse.engines.mesh import Mesh
from enginehouse.engines.train import Mean
from enginehouse.plugin import DispatchMode, PluginLookupError


def group_of(world_size: int, sizes: dict[str, int] | None = None) -> SimpleNamespace:
    """What the modes need of a group."""
    meshes = [Mesh.of(sizes, rank) if sizes else None for rank in range(world_size)]
    return SimpleNamespace(world_size=world_size, layout=DataLayout.of(meshes), name="group")


def rows(*values: int) -> Batch:
    return Batch({"x": torch.tensor(values)})


def test_one_to_all_repeats_and_rank_zero_does_not():
    assert one_to_all(group_of(2), 1, a=2) == [((1,), {"a": 2})] * 2
    assert rank_zero(group_of(3), 1) == [((1,), {}), None, None]


def test_all_to_all_deals_one_entry_a_rank():
    calls = all_to_all(group_of(2), [1, 2], Same([7]), a=PerRank("xy"))
    assert calls == [((1, [7]), {"a": "x"}), ((2, [7]), {"a": "y"})]


def test_all_to_all_refuses_what_it_cannot_deal():
    with pytest.raises(DispatchError, match=r"'a'.* 3 entries for 2 ranks"):
        all_to_all(group_of(2), a=[1, 2, 3])
    with pytest.raises(DispatchError, match="Same"):
        all_to_all(group_of(2), 5)


@given(count=st.integers(0, 20), shards=st.integers(1, 5), replica=st.integers(1, 3))
def test_dp_gives_every_row_to_one_replica_whatever_the_count(count, shards, replica):
    group = group_of(shards * replica, {"dp": shards, "tp": replica})
    batch = rows(*range(count))

    calls = dp(group, batch, "whole", weights=batch, k=3)

    given_rows = [call[0][0].tensor("x").tolist() for call in calls]
    per_replica = given_rows[::replica]
    assert [row for part in per_replica for row in part] == list(range(count))
    assert max(map(len, per_replica)) - min(map(len, per_replica)) <= 1
    for rank, (args, kwargs) in enumerate(calls):
        assert given_rows[rank] == per_replica[rank // replica]
        assert args[0] is calls[rank // replica * replica][0][0], "ranks of a replica share one shard"
        assert kwargs["weights"].tensor("x").tolist() == given_rows[rank]
        assert (args[1], kwargs["k"]) == ("whole", 3)


def test_dp_refuses_batches_of_different_lengths():
    with pytest.raises(DispatchError, match=r"argument 0.*2.*'other'.*1"):
        dp(group_of(2), rows(1, 2), other=rows(1))


def test_only_batches_are_split():
    assert is_splittable(rows(1))
    for other in ("text", b"bytes", [1], torch.zeros(2), np.zeros(2), {"a": 1}):
        assert not is_splittable(other)


def test_concatenation_takes_batches_lists_and_arrays():
    def concat(*parts):
        return collect("concat", parts, range(len(parts)), "group")

    assert concat(rows(1), rows(2, 3)).tensor("x").tolist() == [1, 2, 3]
    assert concat([1], [], [2]) == [1, 2]
    assert concat(torch.tensor([1]), torch.tensor([2])).tolist() == [1, 2]
    assert concat(np.array([1]), np.array([2])).tolist() == [1, 2]
    assert concat(None, None) is None
    with pytest.raises(DispatchError, match="rank 1: NoneType"):
        concat([1], None)
    with pytest.raises(DispatchError, match='collect="list"'):
        concat({"a": 1}, {"a": 2})


def test_metrics_merge_as_means():
    merged = collect("merge", [{"loss": Mean(1.0, 1.0)}, {"loss": Mean(5.0, 2.0)}, {}], range(3), "group")
    assert merged == {"loss": Mean(6.0, 3.0)}


def test_an_unknown_mode_names_the_known_ones_when_called():
    with pytest.raises(PluginLookupError, match="unheard_of"):
        resolve_mode(CallSpec("unheard_of"))


def test_a_mode_that_a_plugin_registered_is_found_by_name(monkeypatch):
    record = DispatchMode(
        name="pairs", dispatch="controller_workers:repeat_pairs", collect="controller_workers:as_they_are"
    )
    found = SimpleNamespace(get=lambda kind, name: {(DispatchMode, "pairs"): record}[kind, name])
    monkeypatch.setattr("enginehouse.plugin.plugins", lambda: found)
    mode = resolve_mode(CallSpec("pairs"))
    assert mode.dispatch(group_of(3), [1, 2]) == [((1,), {}), ((2,), {}), ((1,), {})]
    assert mode.collect(group_of(3), [7, 8, 9], [0, 1, 2]) == [7, 8, 9]


def test_a_plugins_mode_can_do_what_the_built_in_ones_do(monkeypatch):
    record = DispatchMode(
        name="pairs",
        dispatch="controller_workers:repeat_pairs",
        collect="concat",
        returning="enginehouse.controller.dispatch:output_ranks",
        awaits_futures=True,
    )
    monkeypatch.setattr("enginehouse.plugin.plugins", lambda: SimpleNamespace(get=lambda kind, name: record))
    group = group_of(4, {"dp": 2, "tp": 2})
    mode = resolve_mode(CallSpec("pairs"))
    assert mode.awaits_futures
    assert list(mode.returning(group)) == [0, 2]
    assert mode.collect(group, [[1], None, [2], None], [0, 2]) == [1, 2]
    own = resolve_mode(CallSpec("pairs", collect=lambda group, outputs: outputs))
    assert own.returning is None, "a function given with the method gets one output a rank"


def test_an_output_that_is_passed_on_as_it_is_can_be_referred_to():
    passed_on = {mode for mode in Dispatch if resolve_mode(CallSpec(mode.value)).passes_on}
    assert passed_on == {Dispatch.RANK_ZERO}
    assert resolve_mode(CallSpec("one_to_all", collect="first")).passes_on


def test_payloads_are_measured_through_containers():
    assert payload_bytes(np.zeros(1000)) == 8000
    assert payload_bytes({"a": [torch.zeros(1000), b"xyz"]}) > 4000
    assert payload_bytes(object()) == 0
