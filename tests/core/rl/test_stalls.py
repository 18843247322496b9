"""A run that learns nothing is told of in words, and one that takes no step any more ends."""

from __future__ import annotations

import logging
import math

import pytest

from enginehouse.rl.stalls import LONG, MOST_SKIPPED, Stalls, StepsSkipped

LEARNING = {
    "reward/max": 1.0,
    "reward/min": 0.0,
    "reward/groups_all_equal": 0.5,
    "grad_norm": 0.3,
    "loss": 0.1,
    "skipped": 0.0,
    "optimizer_steps": 4.0,
}
SKIPPED = {"skipped": 1.0, "grad_norm": math.nan, "loss": math.nan}


def said(caplog: pytest.LogCaptureFixture, *steps: dict[str, float], groups: bool = True) -> list[str]:
    stalls = Stalls(groups)
    with caplog.at_level(logging.WARNING):
        for number, changed in enumerate(steps, start=1):
            stalls.check(number, LEARNING | changed)
    return [record.getMessage() for record in caplog.records]


def test_a_run_that_learns_is_not_spoken_of(caplog):
    assert said(caplog, *[{}] * 50) == []


def test_the_first_skipped_step_is_told_and_so_many_in_a_row_end_the_run(caplog):
    skipped = [SKIPPED] * (MOST_SKIPPED - 1)
    (warning,) = said(caplog, {}, *skipped, {}, *skipped)
    assert warning.startswith("step 2: 4 of 4 optimizer steps were skipped, as their gradient was not finite (loss nan")
    with pytest.raises(StepsSkipped, match=r"of steps 2 to 4 was skipped.*loss nan.*as after step 1\..*smaller lr"):
        said(caplog, {}, *skipped, SKIPPED)
    assert StepsSkipped.keeps_state


def test_one_optimizer_step_of_several_does_not_count_as_a_skipped_step(caplog):
    (warning,) = said(caplog, *[{"skipped": 0.25, "grad_norm": math.inf}] * 10)
    assert warning.startswith("step 1: 1 of 4 optimizer steps")


ZERO = {"reward/max": 0.0, "reward/groups_all_equal": 1.0, "grad_norm": 0.0}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (ZERO, "every reward was 0"),
        (ZERO | {"reward/max": 1.0, "reward/min": 1.0}, "all samples of each prompt had the same reward"),
        ({"grad_norm": 0.0}, "the gradient was exactly 0"),
        ({"skipped": 1.0, "grad_norm": 0.0}, "no token counted in the loss"),
    ],
)
def test_a_long_stretch_is_told_of_once_by_its_cause(caplog, changed, words):
    assert said(caplog, *[changed] * (LONG - 1), {}, *[changed] * (LONG - 1)) == []
    (warning,) = said(caplog, {}, *[changed] * 3 * LONG)
    assert warning.startswith(f"steps 2 to {LONG + 1}: {words}")


def test_single_samples_are_no_groups(caplog):
    assert said(caplog, *[{"reward/groups_all_equal": 1.0}] * LONG, groups=False) == []
