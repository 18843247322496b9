"""Each property of a loss and an advantage fails on one that breaks it, and on nothing that is right."""

from __future__ import annotations

import pytest

from enginehouse.plugin import Advantage, Loss
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


def failed(record, given=Given()):  # noqa: B008 - frozen
    with Certifier(record, given=given) as certifier:
        results = [certifier.run(case) for case in cases(record)]
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
    assert any(word in said["column"] for word in ("no column 'advantages'", "rows' lengths", "11 rows of 12"))


def test_a_column_of_the_authors_own_is_made_up_where_they_name_it():
    record = Loss(name="own", function="function_mutants:reads_an_own_column")
    assert not failed(record, Given(columns={"rarity": "row"}))
    assert "columns = {'rarity': \"row\"}" in failed(record)["value"]


def test_arguments_are_passed_on():
    said = failed(Loss(name="right", function="function_mutants:right"), Given(arguments={"scale": float("nan")}))
    assert "the total is nan" in said["value"]
