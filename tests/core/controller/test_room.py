"""How the processes of roles are spread over nodes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginehouse.controller import PlacementError, placement_group
from enginehouse.controller.placement_group import Room

EIGHT = {"CPU": 20.0, "GPU": 8.0}
TWO = {"a": EIGHT, "b": EIGHT}


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(placement_group, "describe_cluster", lambda: "")


@pytest.mark.parametrize(
    ("asked", "spread"),
    [
        ([(16, 1)], [[8, 8]]),
        ([(8, 2)], [[4, 4]]),
        ([(8, 1)], [[8]]),
        ([(11, 1)], [[8, 3]]),
        ([(2, 8)], [[1, 1]]),
        ([(8, 1), (2, 4)], [[8], [2]]),
        ([(6, 1), (2, 4)], [[6], [2]]),
        ([(40, 0)], [[20, 20]]),
        ([(4, 1), (4, 1), (1, 8)], [[4], [4], [1]]),
    ],
)
def test_a_role_lies_on_as_few_nodes_as_there_must_be_beside_the_others(asked, spread):
    room = Room(TWO, TWO)
    assert [room.take(*one) for one in asked] == spread


def test_what_others_have_is_waited_for_only_where_there_must_be():
    busy = {"a": EIGHT | {"GPU": 2.0}, "b": EIGHT}
    assert Room(TWO, busy).take(8, 1) == [8]
    assert Room(TWO, busy).take(10, 1) == [8, 2]
    assert Room(TWO, busy).take(12, 1) == [8, 4]  # waits
    assert Room(TWO, {}).take(4, 1) == [4]


def test_neighbours_stay_together_where_they_can():
    six = {node: EIGHT | {"GPU": 6.0} for node in "abc"}
    assert Room(six, six).take(12, 1, 1.0, 4) == [4, 4, 4]
    assert Room(six, six).take(12, 1) == [6, 6]
    assert Room(six, six).take(18, 1, 1.0, 4) == [6, 6, 6]
    assert Room(six, six).take(6, 1, 1.0, 4) == [6]


def test_what_there_is_no_room_for_is_refused_at_once():
    room = Room(TWO, TWO)
    assert room.take(12, 1) == [8, 4]
    with pytest.raises(PlacementError, match=r"not large enough for 2 processes.*besides.*roles.*room for 1 of them\."):
        room.take(2, 4)
    assert room.take(1, 4) == [1]


@given(
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(1, 12), st.integers(0, 4), st.integers(1, 4)), min_size=1, max_size=4),
)
def test_nothing_is_given_twice(nodes, roles):
    there = {str(number): {"GPU": float(gpus), "CPU": float(cpus)} for number, (gpus, cpus) in enumerate(nodes)}
    room, gpus, cpus = Room(there, there), 0, 0
    for processes, each, together in roles:
        try:
            parts = room.take(processes, each, 1.0, together)
        except PlacementError:
            continue
        assert sum(parts) == processes
        assert all(part > 0 for part in parts)
        gpus, cpus = gpus + processes * each, cpus + processes
    assert gpus <= sum(node["GPU"] for node in there.values())
    assert cpus <= sum(node["CPU"] for node in there.values())
