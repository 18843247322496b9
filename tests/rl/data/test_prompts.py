"""Prompts from file to batch."""

import json
from typing import Any

import pytest
import torch
from character_tokenizer import TEMPLATE, ids_of, make_tokenizer

from enginehouse.data import Batch
from enginehouse.errors import DataError
from enginehouse_rl.data.prompts import PromptDataset
from enginehouse_rl.data.sampler import Sampler

CHAT = [{"role": "system", "content": "be good"}, {"role": "user", "content": "hi"}]
RENDERED = "system:be good\nuser:hi\nassistant:"


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_a_batch_of_prompts_holds_tokens_text_row_and_the_other_columns(write: Any, tokenizer: Any, name: str) -> None:
    path = write(name, [{"prompt": f"s{i}=", "answer": i, "kind": {"a": str(i)}} for i in range(5)])
    dataset = PromptDataset.load(path, tokenizer, "prompt", 10)
    batch = dataset.rows([3, 1])
    assert len(dataset) == 5
    assert batch.columns == ("prompt_ids", "prompt", "messages", "row", "columns")
    assert [row.tolist() for row in batch["prompt_ids"]] == [ids_of("s3="), ids_of("s1=")]
    assert batch["prompt_ids"].dtype is torch.int64
    assert batch["prompt"] == ("s3=", "s1=")
    assert batch["messages"] == (None, None)
    assert batch["row"].tolist() == [3, 1]
    assert batch["row"].dtype is torch.int64
    assert batch["columns"] == ({"answer": 3, "kind": {"a": "3"}}, {"answer": 1, "kind": {"a": "1"}})


def test_all_gives_the_first_rows_in_order(write: Any, tokenizer: Any) -> None:
    dataset = PromptDataset.load(write("a.jsonl", [{"prompt": f"p{i}"} for i in range(5)]), tokenizer)
    assert dataset.all()["row"].tolist() == [0, 1, 2, 3, 4]
    assert dataset.all(2)["prompt"] == ("p0", "p1")
    assert len(dataset.all(99)) == 5


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_messages_are_rendered_by_the_chat_template(write: Any, name: str) -> None:
    tokenizer = make_tokenizer(TEMPLATE, begin=True)
    batch = PromptDataset.load(write(name, [{"prompt": CHAT, "x": 1}]), tokenizer).all()
    assert batch["prompt"] == (RENDERED,)
    assert batch["messages"] == (CHAT,)
    assert batch["prompt_ids"][0].tolist() == ids_of(RENDERED), "a template writes the special tokens itself"
    assert batch["columns"] == ({"x": 1},)


def test_the_tokens_are_those_transformers_gives_for_the_messages(write: Any, chat_tokenizer: Any) -> None:
    expected = chat_tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=True, return_dict=True)
    batch = PromptDataset.load(write("a.jsonl", [{"prompt": CHAT}]), chat_tokenizer).all()
    assert batch["prompt_ids"][0].tolist() == expected["input_ids"]


def test_plain_strings_get_the_default_special_tokens(write: Any) -> None:
    path = write("a.jsonl", [{"prompt": "ab"}])
    for template in (None, TEMPLATE):
        tokenizer = make_tokenizer(template, begin=True)
        assert PromptDataset.load(path, tokenizer).all()["prompt_ids"][0].tolist() == [1, *ids_of("ab")]


def test_a_template_can_be_asked_for_plain_strings(write: Any, chat_tokenizer: Any) -> None:
    batch = PromptDataset.load(write("a.jsonl", [{"prompt": "hi"}]), chat_tokenizer, chat_template=True).all()
    assert batch["prompt"] == ("user:hi\nassistant:",)


def test_strings_and_messages_may_be_mixed(write: Any, chat_tokenizer: Any) -> None:
    batch = PromptDataset.load(
        write("a.jsonl", [{"prompt": "a"}, {"prompt": CHAT}, {"prompt": "b"}]), chat_tokenizer
    ).all()
    assert batch["prompt"] == ("a", RENDERED, "b")
    assert [row.tolist() for row in batch["prompt_ids"]] == [ids_of("a"), ids_of(RENDERED), ids_of("b")]


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        (
            ["ok", 7],
            {},
            r"row 2 \(line 2\): the prompt is 7 \(a number\); expected a string, or a list of chat messages",
        ),
        (["ok", None], {}, r"row 2 .*None .null."),
        ([[]], {}, r"row 1 .*list.*expected a string"),
        ([[{"content": "x"}]], {}, r"row 1 .*'role' and 'content'"),
        ([["hi"]], {}, r"row 1 .*'role' and 'content'"),
        (["ok", ""], {}, r"row 2 .*the prompt has no tokens"),
        (
            [[*CHAT, {"role": "assistant", "content": "x"}]],
            {},
            r"row 1 .*ends with a turn of the assistant.*leave it out",
        ),
        (["ok", 7, "ok", None], {}, r"2 rows of the data cannot be used:\n.*row 2 .*\n.*row 4 "),
        ([CHAT], {"chat_template": False}, r"row 1 .*chat messages, but data.chat_template is false"),
        (
            ["abc", "abcdef", "abcdefg"],
            {"max_prompt_tokens": 5},
            r"row 2 \(line 2\): the prompt has 6 tokens, more than data.max_prompt_tokens=5 \(2 rows .* longest has 7",
        ),
    ],
)
def test_a_prompt_that_cannot_be_used_is_named_by_row(write, chat_tokenizer, prompts, options, message) -> None:
    with pytest.raises(DataError, match=message):
        PromptDataset.load(write("a.jsonl", [{"prompt": prompt} for prompt in prompts]), chat_tokenizer, **options)


@pytest.mark.parametrize(("prompt", "chat_template"), [(CHAT, None), ("hi", True)])
def test_a_tokenizer_without_a_template_is_said(write: Any, tokenizer: Any, prompt: Any, chat_template: Any) -> None:
    with pytest.raises(DataError, match="tokenizer has no chat template"):
        PromptDataset.load(write("a.jsonl", [{"prompt": prompt}]), tokenizer, chat_template=chat_template)


@pytest.mark.parametrize("options", [{}, {"chat_template": False}])
def test_what_is_wrong_with_all_messages_is_said_once(write: Any, tokenizer: Any, options: Any) -> None:
    path = write("a.jsonl", [{"prompt": prompt} for prompt in ["ok", *[CHAT] * 8]])
    with pytest.raises(DataError) as caught:
        PromptDataset.load(path, tokenizer, **options)
    (said,) = str(caught.value).splitlines()
    assert said.startswith(f"{path}, row 2 (line 2) and 7 more rows: the prompt is a list of chat messages, but")


def test_what_is_wrong_with_all_messages_does_not_hide_what_is_wrong_with_a_row(write: Any, tokenizer: Any) -> None:
    with pytest.raises(
        DataError, match=r"^10 rows of .* used:\n.*row 2 .* and 7 more rows: .*\n.*row 1 .*7 \(a number\)"
    ) as e:
        PromptDataset.load(write("a.jsonl", [{"prompt": prompt} for prompt in [7, *[CHAT] * 8, 7]]), tokenizer)
    assert len(str(e.value).splitlines()) == 4


def test_a_template_that_refuses_is_quoted(write: Any) -> None:
    tokenizer = make_tokenizer("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(DataError, match=r"row 1 .*the chat template rejects the messages: roles must alternate"):
        PromptDataset.load(write("a.jsonl", [{"prompt": CHAT}]), tokenizer)


def test_arrow_does_not_add_keys_to_messages(write: Any) -> None:
    """Arrow fills a key that only some messages have with None; a template would print it."""
    tokenizer = make_tokenizer("{% for m in messages %}{{ m | length }}{% endfor %}")
    rows = [{"prompt": CHAT}, {"prompt": [{"role": "user", "content": "x", "name": "bob"}]}]
    assert PromptDataset.load(write("a.parquet", rows), tokenizer).all()["prompt"] == ("22", "3")


def test_overlong_prompts_are_left_out_where_that_is_asked_for(write: Any, tokenizer: Any) -> None:
    path = write("a.jsonl", [{"prompt": "p" * n, "n": n} for n in (3, 9, 4, 8, 5)])
    dataset = PromptDataset.load(path, tokenizer, max_prompt_tokens=5, overlong="drop")
    batch = dataset.all()
    assert (len(dataset), dataset.dropped) == (3, 2)
    assert batch["prompt"] == ("ppp", "pppp", "ppppp")
    assert batch["row"].tolist() == [0, 2, 4]
    assert [row["n"] for row in batch["columns"]] == [len(ids) for ids in batch["prompt_ids"]] == [3, 4, 5]
    with pytest.raises(DataError, match=r"leaves none of 5 prompts: the shortest has 3 tokens, more than .*=2"):
        PromptDataset.load(path, tokenizer, max_prompt_tokens=2, overlong="drop")


def test_a_sampler_of_several_files_with_prompts_left_out_resumes(write: Any, tokenizer: Any) -> None:
    files = [
        write("a.jsonl", [{"prompt": "p" * (1 + n % 7), "x": n} for n in range(10)]),
        write("b.parquet", [{"prompt": "q" * (1 + n % 7), "x": n} for n in range(10, 20)]),
    ]

    def sampler(seed: int) -> Sampler[PromptDataset]:
        dataset = PromptDataset.load(files, tokenizer, max_prompt_tokens=5, overlong="drop")
        return dataset.make_sampler(prompts_per_step=4, seed=seed)

    first = sampler(3)
    drawn = [row for _ in range(3) for row in first.next()["columns"]]
    assert all(1 + row["x"] % 7 <= 5 for row in drawn)
    again = sampler(0)
    again.load_state_dict(first.state_dict())
    for _ in range(5):
        assert again.next().equal(first.next())


def test_how_far_tokenizing_is_can_be_shown(write: Any, tokenizer: Any) -> None:
    path = write("a.jsonl", [{"prompt": f"p{n}"} for n in range(3000)])
    shown: list[Any] = []

    def counted(parts: Any, what: str, of: int, size: Any) -> Any:
        shown.extend([what, of])
        for part in parts:
            shown.append(size(part))
            yield part

    PromptDataset.load(path, tokenizer, counted=counted)
    assert shown == ["prompts", 3000, 1024, 1024, 952]


def test_a_sampler_draws_batches_and_resumes(write: Any, tokenizer: Any) -> None:
    path = write("a.jsonl", [{"prompt": f"p{i}", "answer": i} for i in range(7)])
    sampler = PromptDataset.load(path, tokenizer).make_sampler(prompts_per_step=3, seed=5)
    first = Batch.concat([sampler.next(), sampler.next()])
    state = sampler.state_dict()
    assert len(set(first["row"].tolist())) == 6
    assert all(columns["answer"] == row for columns, row in zip(first["columns"], first["row"].tolist(), strict=True))
    resumed = PromptDataset.load(path, tokenizer).make_sampler(prompts_per_step=3, seed=5)
    resumed.load_state_dict(state)
    for _ in range(4):
        assert resumed.next().equal(sampler.next())


def test_files_with_weights_go_round_by_themselves_in_the_order_of_a_column(write: Any, tokenizer: Any) -> None:
    one = write("one.jsonl", [{"prompt": "p" * (1 + n % 3), "level": level} for n, level in enumerate([9, 2.5, 4])])
    two = write("two.parquet", [{"prompt": f"q{n}", "level": -n, "x": n} for n in range(2)])
    weights = {str(one): 2, str(two): 1.0}
    dataset = PromptDataset.load(weights, tokenizer, max_prompt_tokens=2, overlong="drop", order_by="level")
    assert [(source.name, source.rows, source.weight) for source in dataset.sources] == [("one", 2, 2), ("two", 2, 1.0)]
    drawn = dataset.make_sampler(prompts_per_step=12).next()["columns"]
    assert [row["level"] for row in drawn if "x" not in row] == [2.5, 9] * 4
    assert [row["x"] for row in drawn if "x" in row] == [1, 0] * 2


def test_sources_are_called_by_the_shortest_end_of_their_paths_that_differs(write: Any, tokenizer: Any) -> None:
    for folder in ("gsm", "code"):
        (write("x.jsonl", [{"prompt": "p"}]).parent / folder).mkdir()
    paths = [write(name, [{"prompt": "p"}]) for name in ("gsm/train.jsonl", "code/train.jsonl", "b.jsonl")]
    dataset = PromptDataset.load({str(path): 1 for path in paths}, tokenizer)
    assert [source.name for source in dataset.sources] == ["gsm/train", "code/train", "b"]


WITH_TOOLS = (
    "{% if tools %}tools:{% for t in tools %}{{ t.name }} {{ t.keys() | join(',') }}.{% endfor %};{% endif %}"
    + TEMPLATE
)
LOOK = {"name": "look", "strict": None, "limit": 3}
HI = [{"role": "user", "content": "hi"}]


def test_a_system_message_is_put_before_chats_that_have_none(write: Any, chat_tokenizer: Any) -> None:
    path = write("a.jsonl", [{"prompt": prompt} for prompt in (HI, CHAT, "hi")])
    batch = PromptDataset.load(path, chat_tokenizer, chat_template=True, system="be brief").all()
    hi = "system:be brief\nuser:hi\nassistant:"
    assert batch["prompt"] == (hi, RENDERED, hi)
    assert batch["messages"] == ([{"role": "system", "content": "be brief"}, *HI], CHAT, batch["messages"][0])
    assert PromptDataset.load(path, chat_tokenizer, chat_template=True).all()["messages"] == (HI, CHAT, HI)


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_tools_of_a_column_are_given_to_the_template_and_the_reward(write: Any, name: str) -> None:
    rows = [{"prompt": HI, "tools": [LOOK, {"name": "go"}]}, {"prompt": HI, "tools": None}, {"prompt": HI, "tools": []}]
    batch = PromptDataset.load(write(name, rows), make_tokenizer(WITH_TOOLS), tools="tools").all()
    bare = "user:hi\nassistant:"
    assert batch["prompt"] == (f"tools:look name,limit.go name.;{bare}", bare, bare)
    assert [bool(columns["tools"]) for columns in batch["columns"]] == [True, False, False]


def test_the_text_of_tools_is_taken_as_it_stands(write: Any) -> None:
    rows = [{"prompt": HI, "schemas": json.dumps([LOOK])}, {"prompt": HI, "schemas": ""}]
    batch = PromptDataset.load(write("a.parquet", rows), make_tokenizer(WITH_TOOLS), tools="schemas").all()
    assert batch["prompt"] == ("tools:look name,strict,limit.;user:hi\nassistant:", "user:hi\nassistant:")


REFUSING = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + TEMPLATE
UNWRITTEN = {
    "a template without tools": (
        TEMPLATE, [HI, HI], {"tools": [LOOK]}, {"tools": "tools"},
        r"row 1 \(line 1\) and 1 more row: the row has tools .* writes no tools"),
    "tools without a template": (
        None, [HI], {"tools": [LOOK]}, {"tools": "tools"}, "tokenizer has no chat template"),
    "tools for a string": (
        WITH_TOOLS, ["a", "b"], {"tools": [LOOK]}, {"tools": "tools"},
        r"and 1 more row: the prompt is a string.* but the row has tools \(data.tools\): set data.chat_template=true"),
    "a system message for a string": (
        TEMPLATE, ["a", "b"], {}, {"system": "be brief"}, r"and 1 more row: .* data.system is set: set data.chat_tem"),
    "a system message without a template": (
        None, [HI], {}, {"system": "be brief"}, "tokenizer has no chat template"),
    "a template that refuses a system message": (
        REFUSING, [HI], {}, {"system": "s"}, "the messages, the first of which is data.system: no system role"),
    "no list": (
        WITH_TOOLS, [HI], {"tools": {"name": "look"}}, {"tools": "tools"},
        r"row 1 \(line 1\): its tools \(data.tools\) are {'name': 'look'} \(a mapping\); expected a list"),
    "no schemas": (
        WITH_TOOLS, [HI], {"tools": ["look"]}, {"tools": "tools"}, r"are \['look'\] \(a list\); expected a list"),
    "no JSON": (
        WITH_TOOLS, [HI], {"tools": "[look"}, {"tools": "tools"}, "are not valid JSON: .*: '\\[look'"),
    "no column": (
        WITH_TOOLS, [HI], {"tools": []}, {"tools": "tool"}, "has no column 'tool'. Did you mean 'tools'"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", UNWRITTEN)
def test_what_a_chat_template_cannot_write_is_said(write: Any, wrong: str) -> None:
    template, prompts, columns, options, said = UNWRITTEN[wrong]
    path = write("a.jsonl", [{"prompt": prompt} | columns for prompt in prompts])
    with pytest.raises(DataError, match=said):
        PromptDataset.load(path, make_tokenizer(template), **options)
