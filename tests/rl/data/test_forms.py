"""Rows in the forms that people have: GSM8K, MATH, verl, TRL and ShareGPT, read by the keys of the config."""

from typing import Any

import pytest
from character_tokenizer import TEMPLATE, ids_of
from click.testing import CliRunner
from projects import Project, refusal

from enginehouse.cli.main import main
from enginehouse.data.messages import read_text_or_chat
from enginehouse.errors import DataError
from enginehouse_rewards.builtin.numeric import numeric
from enginehouse_rl.data.demonstrations import DemonstrationDataset
from enginehouse_rl.data.prompts import PromptDataset

CHAT = [{"role": "user", "content": "1+1="}]
GSM8K = {"question": "1+1=", "answer": "1 and 1 make <<1+1=2>>2.\n#### 2"}
MATH = {"problem": "1+1=", "solution": r"It is $\boxed{2}$.", "level": "Level 1", "type": "Algebra"}
VERL = {
    "data_source": "sums",
    "prompt": CHAT,
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
}
TRL = {"prompt": CHAT, "solution": "2"}


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("row", "prompt", "columns"),
    [
        (GSM8K, "question", {}),
        (MATH, "problem", {"answer": "solution"}),
        (VERL, "prompt", {"answer": "reward_model.ground_truth"}),
        (TRL, "prompt", {"answer": "solution"}),
    ],
)
def test_a_reward_finds_the_answer(write, chat_tokenizer, suffix: str, row: dict[str, Any], prompt: str, columns):
    path = write(f"a.{suffix}", [row, row])
    dataset = PromptDataset.load(path, chat_tokenizer, prompt, columns=columns)
    assert "1+1=" in dataset.all()["prompt"][0]
    (found, _) = dataset.all()["columns"]
    assert numeric("#### 2", answer=found["answer"])["reward"] == 1.0
    assert tuple(found)
    assert {*found} == {*dataset.shapes()[0].columns} - {prompt}
    assert "solution" not in found
    assert ("reward_model" in found) == (row is VERL)


def test_names_that_lead_nowhere_are_refused(write, chat_tokenizer):
    def load(row: dict[str, Any], **columns: str) -> str:
        with pytest.raises(DataError) as caught:
            PromptDataset.load(write("a.jsonl", [row]), chat_tokenizer, "prompt", columns=columns)
        return str(caught.value)

    assert "no column 'solutoin'. Did you mean 'solution'?" in load(TRL, answer="solutoin")
    said = load(VERL, answer="reward_model.groundtruth")
    assert "row 1 (line 1): column 'reward_model' has no value 'groundtruth', which data.columns calls 'answer'" in said
    assert "Did you mean 'ground_truth'?" in said
    said = load({**TRL, "answer": "3"}, answer="solution")
    assert "has a column 'answer', but data.columns gives this name to 'solution': give the column 'answer'" in said
    swapped = write("b.jsonl", [{**TRL, "answer": "3"}])
    columns = {"answer": "solution", "other": "answer"}
    found = PromptDataset.load(swapped, chat_tokenizer, columns=columns).all()["columns"]
    assert [*found] == [{"answer": "2", "other": "3"}]


def test_a_plan_checks_rewards_by_the_names(project: Project):
    """The reward `scoring:right` takes a column `answer`."""
    project.write_rows("math.jsonl", [{"problem": f"{n}+1=", "solution": str(n + 1)} for n in range(40)])
    words = ["data.train=math.jsonl", "data.prompt=problem"]
    make = project.planned
    assert "answer" in refusal(make, *words)
    named = "data.columns={answer: solution}"
    planned = make(*words, named, "data.validation=math.jsonl", "evaluation.by=answer")
    assert "40 prompts in math.jsonl" in planned.render()
    assert "no column 'soluton'" in refusal(make, *words, "data.columns={answer: soluton}")


SHAREGPT = [
    {"from": "system", "value": "s"},
    {"from": "human", "value": "hi"},
    {"from": "gpt", "value": "yes"},
    {"from": "human", "value": "no"},
    {"from": "gpt", "value": "so"},
]


def test_messages_of_sharegpt_are_chat_messages():
    said = read_text_or_chat(SHAREGPT)
    assert [message["role"] for message in said] == ["system", "user", "assistant", "user", "assistant"]
    assert said[1] == {"role": "user", "content": "hi"}
    assert read_text_or_chat('[{"from": "human", "value": "hi"}]') == [{"role": "user", "content": "hi"}]
    for other in ([{"from": "a stranger", "value": "hi"}], [{"from": "human"}], [1], []):
        assert read_text_or_chat(other) == other


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("form", ["sharegpt", "messages"])
def test_a_whole_chat_is_a_demonstration(write, chat_tokenizer, suffix: str, form: str):
    chat = SHAREGPT[1:] if form == "sharegpt" else read_text_or_chat(SHAREGPT[1:])
    path = write(f"a.{suffix}", [{"chat": chat}])
    batch = DemonstrationDataset.load(path, chat_tokenizer, conversation="chat").all()
    text = "user:hi\nassistant:yes\nuser:no\nassistant:so\n"
    learned = [
        token
        for token, mask in zip(batch["input_ids"][0].tolist(), batch["loss_mask"][0].tolist(), strict=True)
        if mask
    ]
    assert batch["input_ids"][0].tolist()[: len(ids_of(text)) - 1] == ids_of(text)[:-1]
    assert ids_of("yes")[0] in learned
    assert len(learned) < len(ids_of(text)) // 2


def test_a_supervised_run_of_whole_chats_is_planned(project: Project):
    project.write_tokenizer(chat_template=TEMPLATE)
    project.write_rows("chats.jsonl", [{"conversations": SHAREGPT[1:]}] * 40)
    words = ["data.train=chats.jsonl", "data.max_tokens=64"]
    file = str(project.save_sft())
    done = CliRunner().invoke(main, ["plan", "--sft", file, *words, "data.conversation=conversations"])
    assert done.exit_code == 0, (done.output, done.exception)
    assert "40 demonstrations in chats.jsonl" in done.output
    assert "[[y|e|s" in done.output
    assert "[[s|o" in done.output
    done = CliRunner().invoke(main, ["plan", "--sft", file, *words, "data.conversation=conversation"])
    assert "no column 'conversation'. Did you mean 'conversations'?" in done.stderr


def test_a_chat_without_an_answer_is_refused(write, chat_tokenizer):
    rows = [{"chat": CHAT}, {"chat": "text"}, {"chat": [{"role": "assistant", "content": "hi"}]}]
    with pytest.raises(DataError) as caught:
        DemonstrationDataset.load(write("a.jsonl", rows), chat_tokenizer, conversation="chat")
    said = str(caught.value)
    assert "3 rows" in said
    assert "its roles are user" in said
    assert "must be a chat, a list of messages with roles, not 'text'" in said
