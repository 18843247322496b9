"""How errors about an unknown name end."""

import pytest

from enginehouse.errors import MOST_CHOICES, did_you_mean, nearest


@pytest.mark.parametrize(
    ("word", "choices", "message"),
    [
        ("vlm", ["vllm", "torch", "sglang"], "Did you mean 'vllm'? Available: sglang, torch, vllm"),
        ("xyz", ["torch", "fsdp"], "Available: fsdp, torch"),
        ("xyz", [], "None is available"),
    ],
)
def test_an_unknown_name_gets_the_nearest_choice_and_all_choices(word: str, choices: list[str], message: str):
    assert nearest(word, choices) == message


def test_of_many_choices_only_the_nearest_three_are_named():
    choices = [f"loss_{number:02}" for number in range(MOST_CHOICES + 1)]
    message = nearest("loss_07", choices)
    assert message.startswith("Did you mean 'loss_07'? Available: loss_07, ")
    assert message.endswith(f" and {MOST_CHOICES - 2} more")
    assert nearest("zz", choices).count("loss_") == 3


def test_a_word_that_is_like_no_choice_gets_no_question():
    assert did_you_mean("xyz", ["torch"]) == ""
    assert did_you_mean("torhc", ["torch"]) == "Did you mean 'torch'?"
