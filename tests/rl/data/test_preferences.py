"""Preferences as TRL's files have them become rows, and what cannot be used is named by file and row."""

import json
from pathlib import Path

import pytest
import torch

from enginehouse.errors import DataError
from enginehouse_rl.data.preference_files import PreferenceColumns
from enginehouse_rl.data.preferences import PreferenceDataset
from enginehouse_testing.models import EOS_ID, char_tokenizer

PAIRS = PreferenceColumns("prompt", ("chosen", "rejected"))
MARGINS = PreferenceColumns("prompt", ("chosen", "rejected"), "margin", "by")
RATED = PreferenceColumns("prompt", ("completion",), "label", "label")
TEMPLATE = (
    "{% for m in messages %}{{ 'k' if m['role'] == 'user' else 'n' }}{{ m['content'] }}.{% endfor %}"
    "{% if add_generation_prompt %}n{% endif %}"
)


@pytest.fixture
def tokenizer():
    made = char_tokenizer()
    made.chat_template = TEMPLATE
    return made


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def reply(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.fixture
def load(tmp_path: Path, tokenizer):
    def load(rows, columns=PAIRS, **options):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return PreferenceDataset.load(path, tokenizer, columns, **options)

    return load


def said(tokenizer, batch) -> list[tuple[str, str]]:
    """Prompt and response of each row as text; the end of sequence is a `$`."""
    found = []
    for row in range(len(batch)):
        ids, mask = batch.row(row)["input_ids"], batch.row(row)["loss_mask"]
        text = ["".join(tokenizer.convert_ids_to_tokens(part.tolist())) for part in (ids[~mask], ids[mask])]
        found.append(tuple(part.replace("<eos>", "$") for part in text))
    return found


def test_a_pair_is_two_rows_the_better_one_first(load, tokenizer):
    data = load([{"prompt": "1+1=", "chosen": "2", "rejected": "3"}, {"prompt": "ab", "chosen": "c", "rejected": "dd"}])
    assert len(data) == 2
    assert said(tokenizer, data.rows([1, 0])) == [("ab", "c$"), ("ab", "dd$"), ("1+1=", "2$"), ("1+1=", "3$")]
    assert data.all().columns == ("input_ids", "loss_mask")


def test_chat_messages_are_written_as_the_template_has_them_after_the_prompt(load, tokenizer):
    row = {"prompt": [user("b")], "chosen": [reply("c")], "rejected": [reply("d"), user("e"), reply("f")]}
    expected = [("kb.n", "c.$"), ("kb.nke.n", "d.f.$")]
    assert said(tokenizer, load([row]).all()) == expected, "no words but the assistant's"
    mixed = {"prompt": [user("b")], "chosen": "c", "rejected": [reply("d")]}
    assert said(tokenizer, load([mixed]).all()) == [("kb.n", "c$"), ("kb.n", "d.$")]


def test_without_a_column_of_prompts_responses_begin_with_it(load, tokenizer):
    text = {"chosen": "a b = 1", "rejected": "a b = 22"}
    assert said(tokenizer, load([text]).all()) == [("a b =", " 1$"), ("a b =", " 22$")]
    chat = {"chosen": [user("b"), reply("c")], "rejected": [user("b"), reply("d")]}
    assert said(tokenizer, load([chat]).all()) == [("kb.n", "c.$"), ("kb.n", "d.$")]
    beside = {"prompt": "b", **chat}
    assert said(tokenizer, load([beside]).all()) == [("kb.n", "c.$"), ("kb.n", "d.$")], "as UltraFeedback has it"


def test_figures_are_those_of_both_rows_of_a_pair(load):
    rows = [{"prompt": "a", "chosen": "b", "rejected": "c", "by": by} for by in (1, 0.5)]
    assert load(rows, MARGINS).all()["margin"].tolist() == [1.0, 1.0, 0.5, 0.5]
    rated = [{"prompt": "a", "completion": "b", "label": label} for label in (True, False)]
    label = load(rated, RATED).all()["label"]
    assert (label.tolist(), label.dtype) == ([True, False], torch.bool)


def test_mismatched_rows_have_the_response_of_the_next_row(load, tokenizer):
    rows = [{"prompt": p, "completion": c, "label": True} for p, c in (("a", "11"), ("bbb", "2"), ("cc", "3456"))]
    data = load(rows, RATED, max_tokens=7)
    mismatched = data.mismatch(data.all())
    assert said(tokenizer, mismatched) == [("a", "2$"), ("bbb", "3456"), ("cc", "11$")]
    assert mismatched["input_ids"][0][-1] == EOS_ID


GOOD = {"prompt": "a", "chosen": "b", "rejected": "c"}


@pytest.mark.parametrize(
    ("row", "columns", "problem"),
    [
        ({"prompt": "a", "chosen": "b"}, PAIRS, "row 2 (line 2) has no column 'rejected'"),
        (
            GOOD | {"chosen": 3},
            PAIRS,
            "row 2 (line 2): the response in column 'chosen' is a number, expected a string",
        ),
        (GOOD | {"chosen": [reply("b")]}, PAIRS, "'chosen' is a list of chat messages, but the prompt is a string"),
        (GOOD | {"prompt": [user("a")], "rejected": ["c"]}, PAIRS, "'rejected' is ['c']; expected a string, or chat"),
        (GOOD | {"prompt": [user("a"), reply("b")]}, PAIRS, "the prompt ends with a turn of the assistant"),
        (GOOD | {"rejected": "c" * 40}, PAIRS, "row 2 (line 2): prompt and response together has 42 tokens, more than"),
        (GOOD | {"by": "much"}, MARGINS, "row 2 (line 2): column 'by' is 'much', expected a number"),
        ({"prompt": "a", "completion": "b", "label": 1}, RATED, "column 'label' is 1, expected true or false"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(load, row, columns, problem):
    first = GOOD | {"by": 1.0} if columns is not RATED else {"prompt": "a", "completion": "b", "label": True}
    with pytest.raises(DataError) as caught:
        load([first, row], columns, max_tokens=32)
    assert problem in str(caught.value)
    assert "rows.jsonl, row 2 (line 2)" in str(caught.value)


def test_responses_without_a_prompt_have_to_begin_alike(load):
    with pytest.raises(DataError, match=r"row 1 .*: there is no prompt .* have no common beginning"):
        load([{"chosen": "b", "rejected": "c"}])
    with pytest.raises(DataError, match="'chosen' and 'rejected' are equal"):
        load([{"chosen": "ab", "rejected": "ab"}])
    with pytest.raises(DataError, match=r"row 2 .* has a column 'prompt', but the first row has none"):
        load([{"chosen": "ab", "rejected": "ac"}, GOOD])
