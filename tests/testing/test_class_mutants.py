"""Each property of a tracker and an environment fails on one that breaks it, and on nothing that is right."""

import pytest
import tracker_mutants

from enginehouse.plugin import Environment, Tracker, plugins
from enginehouse_testing.given import Given
from enginehouse_testing.running import Certifier, cases

TRACKERS = [
    ("Right", set(), ""),
    ("NeverWrites", {"written", "resumed", "not_finite", "many"}, "nothing can be read back"),
    ("ForgetsValidations", {"written", "resumed"}, "validation/reward of step 0"),
    ("BeginsAnew", {"resumed"}, "of step 0"),
    ("RefusesNumbers", {"not_finite"}, "out of range"),
    ("EndsWellOnly", {"outcomes"}, "KeyError"),
    ("TakesAThousand", {"many"}, "metric/0 of step 2000"),
]

ENVIRONMENTS = [
    ("TwoTurns", set(), ""),
    ("CountsItsOwnWords", {"tokens"}, "the policy did not generate it after the 8 tokens before it"),
    ("AsksForSomethingElse", {"tokens"}, "the policy generated nothing after exactly these tokens"),
    ("RoundsLogprobs", {"tokens"}, "has the logprob -0.6, but was generated with -0.625"),
    ("OneTooFew", {"episodes"}, "2 episode(s), but must return 3"),
    ("LosesALogprob", {"episodes"}, "17 tokens, 17 mask, 18 logprobs, 17 versions"),
    ("ForgetsItsFirstTurn", set(), ""),
    ("CountsItsFirstTurnTwice", {"tokens"}, "row 1 of its 2: its token 7"),
    ("OrdersItsRowsByTime", {"order", "at_once"}, "which request ends first"),
    ("FirstComeFirst", {"order", "at_once"}, "which request ends first"),
    ("Remembers", {"at_once"}, "gives other episodes if other tasks"),
    ("Blocks", {"loop"}, "await slow operations"),
    ("CannotBeCancelled", {"cancelled"}, "after it was cancelled"),
    ("SwallowsErrors", {"errors"}, "the run would never learn"),
]


def failed(record, given=Given(), checks=None, timeout=None):  # noqa: B008 - frozen
    with Certifier(record, given=given, timeout=timeout) as certifier:
        results = [certifier.run(case) for case in cases(record, checks=checks)]
    return {one.name: one.detail for one in results if one.outcome == "failed"}


@pytest.mark.parametrize(("name", "broken", "word"), TRACKERS, ids=[name for name, *_ in TRACKERS])
def test_a_broken_tracker_is_found_by_what_is_there_for_it(name, broken, word):
    record = Tracker(name=name, tracker=f"tracker_mutants:{name}")
    said = failed(record, Given(read=tracker_mutants.read))
    assert set(said) == broken, said
    assert word in " ".join(said.values())


def test_a_tracker_that_hangs_costs_no_more_than_the_deadline():
    said = failed(Tracker(name="hangs", tracker="tracker_mutants:Hangs"), checks=["life"], timeout=0.2)
    assert said == {"life": "TimeoutError: it took more than 0.2 s"}


def test_what_cannot_be_read_back_is_said_not_to_have_been():
    record = Tracker(name="mine", tracker="tracker_mutants:NeverWrites")
    with Certifier(record) as certifier:
        (result,) = (certifier.run(case) for case in cases(record, checks=["written"]))
    assert (result.outcome, result.detail.split(":")[0]) == ("not run", "it needs a way to read metrics back")


@pytest.mark.parametrize(("name", "broken", "word"), ENVIRONMENTS, ids=[name for name, *_ in ENVIRONMENTS])
def test_a_broken_environment_is_found_by_what_is_there_for_it(name, broken, word):
    checks = ["episodes", "loop"] if name == "Blocks" else None  # each play takes its time
    said = failed(Environment(name=name, environment=f"environment_mutants:{name}"), checks=checks)
    assert set(said) == broken, said
    assert word in " ".join(said.values())


def test_cores_own_environment_passes():
    assert not failed(Environment(name="one", environment="enginehouse_rl.environments.single_turn:SingleTurn"))


@pytest.mark.slow
def test_tensorboard_passes():
    assert not failed(plugins().get(Tracker, "tensorboard"))
