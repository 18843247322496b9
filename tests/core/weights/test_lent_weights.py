"""Weights that an actor lends to a rollout in its process: verified as ever, and nothing is drawn as they change."""

import pytest

from enginehouse.engines.weights import LoanOver
from enginehouse.weights.checksums import MIXED

from .roles_for_tests import GREEDY, PROMPTS, open_house


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_drawn_of_lent_weights_is_what_is_drawn_of_copies(dtype):
    answers = []
    for lends, sums_in_place in ((True, True), (True, False), (False, True), (False, False)):
        with open_house("inproc", dtype=dtype) as house:
            sync = house.connect(lends=lends, sums_in_place=sums_in_place)
            sync.publish(1)
            sums = house.rollout.weight_state()[0].checksums.values()
            assert {total.startswith(MIXED) for total in sums} == {sums_in_place}
            answers.append([house.answers()])
            for version in (2, 3):
                house.train()
                report = sync.publish(version)
                assert house.versions() == [version]
                assert report.effect is not None or version > 2
                answers[-1].append(house.answers())
    assert answers == [answers[0]] * 4
    assert answers[0][0] != answers[0][2]


@pytest.mark.parametrize("change", ["update", "load", "offload"])
def test_nothing_is_drawn_from_the_time_the_actor_changes_its_weights_until_they_are_published(change, tmp_path):
    with open_house("inproc") as house:
        sync = house.connect(lends=True)
        sync.publish(1)
        house.actor.save(str(tmp_path / "saved"))
        house.answers()
        if change == "update":
            house.train()
        elif change == "load":
            house.actor.load(str(tmp_path / "saved"))
        else:
            house.actor.offload()
            house.actor.onload()
        with pytest.raises(Exception, match="it needs a weight update first") as error:
            house.rollout.generate(PROMPTS, GREEDY)
        assert isinstance(getattr(error.value, "cause", error.value), LoanOver)
        sync.publish(2)
        house.answers()


def test_unless_they_may_be_lent_the_old_version_is_drawn_from_while_the_actor_trains():
    with open_house("inproc") as house:
        house.connect().publish(1)
        before = house.answers()
        house.train()
        assert house.answers() == before
