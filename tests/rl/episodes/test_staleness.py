"""Which groups are begun and taken, for any order in which they end."""

from hypothesis import given
from hypothesis import strategies as st

from enginehouse_rl.episodes.staleness import StalenessWindow


def begin(schedule: StalenessWindow, serial: int, version: int, wanted: int, left: int) -> int:
    for _ in range(schedule.count_room(wanted, left)):
        schedule.begin(serial, version)
        serial += 1
    return serial


@given(
    groups=st.integers(1, 4),
    staleness=st.integers(0, 3),
    steps=st.integers(1, 8),
    data=st.data(),
)
def test_whatever_ends_first_nothing_old_is_trained_on_and_nothing_is_left_out(groups, staleness, steps, data):
    """Groups end, are refused and are taken in any order: who is taken is fresh, once, and nobody waits for ever."""
    schedule, serial, version = StalenessWindow(groups, staleness), 0, 1
    born, trained, refused = {}, [], 0
    left = steps * groups

    def fill(wanted):
        nonlocal serial
        first, serial = serial, begin(schedule, serial, version, wanted, left)
        born.update(dict.fromkeys(range(first, serial), version))

    for _ in range(steps):
        fill(groups)
        while (chosen := schedule.choose(version)) is None:
            unfinished = [one for one in schedule.open_groups if one not in schedule._ended]
            assert unfinished  # else the step waits for ever
            one = data.draw(st.sampled_from(unfinished))
            if data.draw(st.integers(0, 5)) == 0 and refused < 20:
                refused += 1
                schedule.give_up(one)
                fill(groups)
            else:
                schedule.end(one)
        assert len(chosen) == groups
        assert chosen == sorted(chosen)
        assert all(version - born[one] <= staleness for one in chosen)
        trained += chosen
        left -= groups
        assert not schedule.find_overdue(version + 1)  # nothing is ever wasted for its age
        fill(0)
        for one in [one for one in schedule.open_groups if one not in schedule._ended and data.draw(st.booleans())]:
            schedule.end(one)  # while the step trains
        version += 1
    assert len(set(trained)) == len(trained) == steps * groups
    assert not schedule.open_groups
    assert serial == steps * groups + refused


@given(groups=st.integers(1, 4), extra=st.integers(1, 3), staleness=st.integers(0, 2), data=st.data())
def test_extra_groups_are_used_while_fresh_and_else_given_up(groups, extra, staleness, data):
    schedule, serial, left = StalenessWindow(groups, staleness, extra), 0, 6 * groups
    born, seen = {}, set()
    for version in range(1, 7):
        for one in schedule.find_overdue(version):
            schedule.give_up(one)
            seen.add(one)
        first, serial = serial, begin(schedule, serial, version, groups, left)
        born.update(dict.fromkeys(range(first, serial), version))
        while (chosen := schedule.choose(version)) is None:
            schedule.end(
                data.draw(st.sampled_from([one for one in schedule.open_groups if one not in schedule._ended]))
            )
        assert all(version - born[one] <= staleness for one in chosen)
        assert not seen.intersection(chosen)
        seen.update(chosen)
        left -= groups
    assert seen.union(schedule.open_groups) == set(range(serial))


def test_with_staleness_0_a_step_begins_what_it_trains_on():
    schedule = StalenessWindow(3)
    assert schedule.count_room(0, 30) == 0
    assert begin(schedule, 0, 1, 3, 30) == 3
    for serial in (2, 0):
        schedule.end(serial)
        assert schedule.choose(1) is None
    schedule.end(1)
    assert schedule.choose(1) == [0, 1, 2]
    assert schedule.count_room(0, 27) == 0


def test_with_staleness_1_the_next_step_is_drawn_while_this_one_trains():
    schedule = StalenessWindow(2, staleness=1)
    assert begin(schedule, 0, 1, 2, 6) == 4
    schedule.end(3)
    schedule.end(1)
    assert schedule.choose(1) == [1, 3]
    assert schedule.open_groups == (0, 2)  # begun with version 1: the next step has to take them
    assert schedule.count_room(0, 4) == 0
    assert begin(schedule, 4, 2, 2, 4) == 6
    for serial in (4, 5, 0):
        schedule.end(serial)
        assert schedule.choose(2) is None
    schedule.end(2)
    assert schedule.choose(2) == [0, 2]


def test_towards_the_end_no_more_is_begun_than_is_trained_on():
    schedule = StalenessWindow(2, staleness=3)
    assert schedule.count_room(2, 4) == 4
    assert schedule.count_room(2, 2) == 2
