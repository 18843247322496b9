"""Each property of a loss, an advantage and a reward fails on one that breaks it, and on nothing that is right."""

import pytest

from enginehouse.errors import UserError
from enginehouse.plugin import Advantage, Loss, Reward
from enginehouse_testing.given import Given
from enginehouse_testing.running import Certifier, cases

RANDOM = {"repeatable", "cut", "uncounted", "silent_rows", "gradient"}
"""What one that is never the same twice cannot pass."""

LOSSES = [
    ("right", set()),
    ("stops_a_factor_on_purpose", set()),
    ("averages_each_micro_batch", {"cut"}),
    ("has_a_figure_of_the_micro_batch", {"cut"}),
    ("counts_masked_tokens", {"uncounted", "silent_rows"}),
    ("adds_masked_tokens", {"uncounted", "silent_rows"}),
    ("counts_silent_rows", {"silent_rows"}),
    ("is_nan_where_nothing_counts", {"silent_rows"}),
    ("is_detached", {"value"}),
    ("has_no_number_for_a_figure", {"value", "cut", "silent_rows"}),
    ("has_a_wrong_backward", {"gradient"}),
    ("loses_a_factor", {"gradient"}),
    ("writes_into_a_column", {"untouched"}),
    ("is_random", RANDOM),
]

ADVANTAGES = [
    ("centred", set()),
    ("expects_adjacent_groups", {"order"}),
    ("credits_the_first_more", {"order"}),
    ("writes_into_rewards", {"untouched"}),
    ("reads_more_than_it_needs", {"needs"}),
    ("believes_in_labels", {"labels"}),
    ("divides_by_nothing", {"equal_rewards"}),
    ("needs_two_samples", {"one_sample"}),
    ("sums_masked_tokens", {"uncounted"}),
    ("divides_by_counted_tokens", {"silent_rows"}),
    ("draws_lots", {"repeatable", "order", "needs", "labels", "uncounted"}),
]

REWARDS = [
    ("exact", set(), ""),
    ("asks", set(), ""),
    ("is_not_a_number", {"score"}, "response '7 7 7' returned nan"),
    ("has_a_figure_of_the_runs", {"score"}, "a figure 'mean'"),
    ("raises_at_odd_responses", {"odd_responses"}, "nothing: raised IndexError"),
    ("hangs_at_odd_responses", {"odd_responses"}, "a line that never ends: did not return within 0.3 s"),
    ("throws_dice", {"repeatable", "alone"}, "the second time"),
    ("remembers", {"repeatable", "alone"}, "the second time"),
    ("centres", {"alone"}, "alone response '4' gets 0.0"),
    ("prints", {"quiet"}, "8 bytes"),
]


def failed(record, given=Given(), checks=None):  # noqa: B008 - frozen
    with Certifier(record, given=given) as certifier:
        results = [certifier.run(case) for case in cases(record, checks=checks)]
    return {one.name: one.detail for one in results if one.outcome == "failed"}


@pytest.mark.parametrize(("name", "broken"), LOSSES, ids=[name for name, _ in LOSSES])
def test_a_broken_loss_is_found_by_what_is_there_for_it(name, broken):
    said = failed(Loss(name=name, function=f"function_mutants:{name}"))
    assert set(said) == broken, said


@pytest.mark.parametrize(("name", "broken"), ADVANTAGES, ids=[name for name, _ in ADVANTAGES])
def test_a_broken_advantage_is_found_by_what_is_there_for_it(name, broken):
    needs = {
        "sums_masked_tokens": ("reward", "group", "loss_mask", "values"),
        "divides_by_counted_tokens": ("reward", "group", "loss_mask"),
    }.get(name, ("reward", "group"))
    said = failed(Advantage(name=name, function=f"function_mutants:{name}", needs=needs))
    assert set(said) == broken, said


@pytest.mark.parametrize("name", ["forgets_the_column", "credits_tokens_that_are_not_there", "drops_rows"])
def test_an_advantage_that_returns_something_else_is_told_what(name):
    said = failed(Advantage(name=name, function=f"function_mutants:{name}", needs=("reward", "group", "loss_mask")))
    assert "column" in said
    assert any(word in said["column"] for word in ("no column 'advantages'", "the row lengths", "batch has 12"))


def test_a_column_of_the_authors_own_is_made_up_where_they_name_it():
    record = Loss(name="own", function="function_mutants:reads_an_own_column")
    assert not failed(record, Given(columns={"rarity": "row"}))
    assert "columns = {'rarity': \"row\"}" in failed(record)["value"]


def test_arguments_are_passed_on():
    said = failed(Loss(name="right", function="function_mutants:right"), Given(arguments={"scale": float("nan")}))
    assert "the total is nan" in said["value"]


@pytest.mark.parametrize(("name", "broken", "word"), REWARDS, ids=[name for name, *_ in REWARDS])
def test_a_broken_reward_is_found_by_what_is_there_for_it(name, broken, word):
    said = failed(Reward(name=name, function=f"reward_mutants:{name}"), Given(seconds=0.3))
    assert set(said) == broken, said
    assert word in " ".join(said.values())


@pytest.mark.parametrize(
    ("name", "word"), [("hangs", "did not return within 0.2 s"), ("takes_its_process_down", "exit code 3")]
)
def test_a_reward_that_scores_nothing_costs_no_more_than_its_deadlines(name, word):
    given = Given(seconds=0.2, examples=[{"response": "4", "answer": "4"}])
    said = failed(Reward(name=name, function=f"reward_mutants:{name}"), given, ["score"])
    assert word in said["score"]


def test_an_example_says_what_its_reward_is_to_be():
    examples = [{"response": "4", "answer": "4", "reward": 1.0}, {"response": "5", "answer": "4", "reward": 0.5}]
    said = failed(Reward(name="exact", function="reward_mutants:exact"), Given(examples=examples))
    assert said == {"expected": "the reward of response '5' is 0, not 0.5"}


def test_one_that_says_that_it_is_not_repeatable_need_not_be():
    record = Reward(name="dice", function="reward_mutants:throws_dice")
    assert not failed(record, Given(repeatable=False))


def test_a_column_that_no_example_has_is_the_authors_mistake():
    with pytest.raises(UserError, match=r"takes 'rubric', which is neither .* --examples FILE"):
        failed(Reward(name="graded", function="reward_mutants:takes_a_column"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [({"scales": 2.0}, "Did you mean 'scale'"), ({"scale": "two"}, "expected a number")],
    ids=str,
)
def test_arguments_that_a_function_does_not_take_are_refused_before_anything_runs(arguments, said):
    with pytest.raises(UserError, match=said):
        failed(Loss(name="right", function="function_mutants:right"), Given(arguments=arguments))
