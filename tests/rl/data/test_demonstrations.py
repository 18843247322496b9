"""Demonstrations from file to batch."""

from typing import Any

import pytest
import torch
from character_tokenizer import ids_of, make_tokenizer

from enginehouse.errors import DataError
from enginehouse_rl.data.demonstrations import DemonstrationDataset

END = 2


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_a_demonstration_is_prompt_response_and_end_with_the_mask_on_what_is_learnt(write, tokenizer, name) -> None:
    rows = [{"prompt": "s21=", "response": "12"}, {"prompt": "s1=", "response": "1"}, {"prompt": "x", "response": ""}]
    batch = DemonstrationDataset.load(write(name, rows), tokenizer).rows([1, 2, 0])
    assert batch.columns == ("input_ids", "loss_mask")
    assert [row.tolist() for row in batch["input_ids"]] == [
        [*ids_of("s1=1"), END],
        [*ids_of("x"), END],
        [*ids_of("s21=12"), END],
    ]
    assert [row.tolist() for row in batch["loss_mask"]] == [
        [False] * 3 + [True] * 2,
        [False, True],
        [False] * 4 + [True] * 3,
    ]
    assert batch["input_ids"].dtype is torch.int64
    assert batch["loss_mask"].dtype is torch.bool
    assert batch["loss_mask"].offsets is batch["input_ids"].offsets


def test_only_the_prompt_gets_beginning_tokens_and_an_end_is_not_doubled(write: Any) -> None:
    path = write("a.jsonl", [{"prompt": "a", "response": "b</s>"}])
    batch = DemonstrationDataset.load(path, make_tokenizer(begin=True)).all()
    assert batch["input_ids"][0].tolist() == [1, *ids_of("ab"), END]


def test_messages_are_rendered_before_the_response(write: Any, chat_tokenizer: Any) -> None:
    path = write("a.jsonl", [{"q": [{"role": "user", "content": "hi"}], "a": "yes"}])
    batch = DemonstrationDataset.load(path, chat_tokenizer, prompt_column="q", response_column="a").all(1)
    assert batch["input_ids"][0].tolist() == [*ids_of("user:hi\nassistant:yes"), END]
    assert batch["loss_mask"].values.sum() == 4


def test_a_tokenizer_without_an_end_adds_none(write: Any) -> None:
    tokenizer = make_tokenizer(end=False)
    batch = DemonstrationDataset.load(write("a.jsonl", [{"prompt": "a", "response": "b"}]), tokenizer).all()
    assert batch["input_ids"][0].tolist() == ids_of("ab")
    with pytest.raises(DataError, match=r"row 1 .*'response' has no tokens"):
        DemonstrationDataset.load(write("b.jsonl", [{"prompt": "a", "response": ""}]), tokenizer)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": "a"}], "no column 'response'"),
        (
            [{"prompt": "a", "response": "b"}, {"prompt": "a", "response": 3}],
            r"row 2 \(line 2\): the response .* is a number",
        ),
        ([{"prompt": "abc", "response": "def"}], r"row 1 .*together has 7 tokens, more than data.max_tokens=6"),
        ([{"prompt": 1, "response": "def"}], r"row 1 .*the prompt is 1"),
    ],
)
def test_a_demonstration_that_cannot_be_used_is_named(write: Any, tokenizer: Any, rows: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        DemonstrationDataset.load(write("a.jsonl", rows), tokenizer, max_tokens=6)


def test_the_sampler_is_the_one_prompts_have(write: Any, tokenizer: Any) -> None:
    path = write("a.jsonl", [{"prompt": f"p{i}", "response": str(i)} for i in range(5)])
    sampler = DemonstrationDataset.load(path, tokenizer).make_sampler(rows_per_step=5, seed=1)
    seen = sorted(tuple(row.tolist()) for row in sampler.next()["input_ids"])
    assert seen == sorted((*ids_of(f"p{i}{i}"), END) for i in range(5))
    resumed = sampler.dataset.make_sampler(rows_per_step=5, seed=9)
    resumed.load_state_dict(sampler.state_dict())
    assert resumed.next().equal(sampler.next())


def test_files_of_demonstrations_may_have_weights(write: Any, tokenizer: Any) -> None:
    one, two = (
        write(name, [{"prompt": name[0], "response": "x"}] * rows) for name, rows in (("a.jsonl", 2), ("b.jsonl", 9))
    )
    dataset = DemonstrationDataset.load({str(one): 3, str(two): 1}, tokenizer)
    sampler = dataset.make_sampler(rows_per_step=40)
    first = [row[0].item() for row in sampler.next()["input_ids"]]
    assert abs(first.count(ids_of("a")[0]) - 30) <= 2
    assert sampler.metrics() == {
        "data/a/epoch": first.count(ids_of("a")[0]) / 2,
        "data/b/epoch": first.count(ids_of("b")[0]) / 9,
    }
