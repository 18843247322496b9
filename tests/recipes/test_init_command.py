"""`enginehouse init`: every combination of answers is refused at once, or makes a config that `plan` accepts."""

import csv
import itertools
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import chdir
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hub_server import Hub
from projects import Project

from enginehouse.cli.main import main
from enginehouse.errors import ConfigError, UserError
from enginehouse.plugin import load_plugins
from enginehouse_recipes import DIRECTORY, chat, sorting
from enginehouse_recipes.init.commented import write_commented
from enginehouse_recipes.init.machines import choose_engines, read_machine
from enginehouse_recipes.init.models import ChosenModel
from enginehouse_recipes.init.new_files import NewFiles
from enginehouse_recipes.init.prompt_data import SAMPLES, PromptData, read_rows
from enginehouse_recipes.init.rewards import fitting_rewards, read_reward, reward_texts
from enginehouse_rl.config.document import parse
from enginehouse_rl.config.load import load_config
from enginehouse_rl.config.schema import Config

CHAT = [{"role": "user", "content": "6 * 7"}]
SAID = [*CHAT, {"role": "assistant", "content": "42"}]
WRITTEN = ["config.yaml", "reward.py", "test_reward.py"]
MODELS, DATA = ("tiny", "chat", "text"), ("sorting", "calculator", "chats.jsonl", "texts.csv", "verl.parquet")
MACHINES = ("laptop", "1", "4", "8@auto")


def begin(*words: str, answers: str | None = None) -> Result:
    return CliRunner().invoke(main, ["init", *words], input=answers)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model directories without weights, one with a chat template; and what the tiny model begins from."""
    root = tmp_path_factory.mktemp("models")
    made = Project(root)
    for name, tokenizer in (("chat", chat.make_tokenizer()), ("text", sorting.make_tokenizer())):
        made.make_model(name, tokenizer, max_position_embeddings=400)
    recipes = root / DIRECTORY
    for name, like in (("sft", "text"), ("sft_chat", "chat")):
        shutil.copytree(root / like, recipes / name / "model")
    (recipes / "task").mkdir()
    (recipes / "chat").mkdir()
    rows = [{"prompt": "s10=", "answer": "01"}] * 64
    for name in ("task/train", "task/validation"):
        made.write_rows(f"{DIRECTORY}/{name}.jsonl", rows)
    for name in ("chat/calculator", "chat/calculator_validation"):
        made.write_rows(f"{DIRECTORY}/{name}.jsonl", [{"prompt": CHAT, "answer": "42"}] * 64)
    return root


@pytest.fixture
def here(tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current directory, with data beside it; nothing of it stays imported."""
    import pyarrow
    from pyarrow import parquet

    root = tmp_path / "a place: mine, yours"
    root.mkdir()
    monkeypatch.chdir(root)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "chats.jsonl").write_text(json.dumps({"Question": CHAT, "final_answer": 42}) + "\n", "utf-8")
    (tmp_path / "texts.csv").write_text("problem,level,answer\nSort 10,1,01\nSort 32,1,23\n", "utf-8")
    verl = [{"data_source": "a", "prompt": CHAT, "reward_model": {"style": "rule", "ground_truth": "42"}}] * 2
    parquet.write_table(pyarrow.Table.from_pylist(verl), tmp_path / "verl.parquet")
    for name in ("reward", "test_reward"):  # of another directory, which another test imported
        monkeypatch.delitem(sys.modules, name, raising=False)
    known = set(sys.modules)
    yield root
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def refused(model: str, data: str) -> str | None:
    """Why a model cannot learn from data; None if it can."""
    if model == "tiny" and data not in SAMPLES:
        return "the model 'tiny' knows only the characters"
    if model == "text" and data == "calculator":
        return "which tool calls need"
    if model == "text" and data in ("chats.jsonl", "verl.parquet"):
        return "has no chat template: choose a chat model"
    return None


@pytest.mark.parametrize(("model", "data"), [*itertools.product(MODELS, DATA)])
def test_all_answers_that_are_taken_make_a_config_that_is_planned(here: Path, models: Path, model: str, data: str):
    given = data if data in SAMPLES else f"../{data}"
    named = model if model == "tiny" else str(models / model)
    for number, (reward, machine) in enumerate(itertools.product((None, "own"), MACHINES)):
        if reward and machine != "laptop":
            continue  # what a reward is has nothing to do with machines
        root = here / str(number)
        root.mkdir()
        if model == "tiny":
            (root / "runs").symlink_to(models / "runs")
        words = [str(root), "--model", named, "--data", given, "--machine", machine, "--yes"]
        done = begin(*words, *(["--reward", reward] if reward else []))
        if (why := refused(model, data)) is not None:
            assert done.exit_code == 2
            assert why in done.stderr
            assert {entry.name for entry in root.iterdir()} <= {"runs"}
            continue
        assert done.exit_code == 0, done.output
        assert "`enginehouse plan` accepts it" in done.stdout
        assert {entry.name for entry in root.iterdir()} >= set(WRITTEN)
        config = load_config(root / "config.yaml")
        gpus = read_machine(machine).gpus
        assert (config.cluster.device, config.actor.processes) == ("cuda" if gpus else "cpu", max(gpus, 1))
        if model == "chat" and data != "sorting":
            assert config.data.chat_template is (None if data != "texts.csv" else True)


@pytest.mark.parametrize(
    ("columns", "prompt", "answer"),
    [
        ({"prompt": "a", "answer": "b"}, "prompt", "answer"),
        ({"question": "a", "answer": "b"}, "question", "answer"),
        ({"Problem": "a", "solution": "long", "answer": "b"}, "Problem", "answer"),
        ({"answer": "b", "question": "a", "input": "c"}, "question", "answer"),
        ({"id": 3, "prompt": CHAT, "label": 1}, "prompt", "label"),
        ({"messages": CHAT, "ground_truth": 0}, "messages", "ground_truth"),
        ({"messages": SAID, "problem": "a", "answer": "b"}, "problem", "answer"),
        ({"prompt": 3, "question": "a"}, "question", None),
        ({"prompt": CHAT, "reward_model": {"ground_truth": "1"}}, "prompt", "reward_model"),
        ({"prompt": CHAT, "answer": ["1"]}, "prompt", None),
        ({"prompt": CHAT, "answer": None, "target": "1"}, "prompt", "target"),
    ],
)  # fmt: skip
def test_columns_are_told_by_name_and_by_what_they_hold(tmp_path, columns, prompt, answer):
    (tmp_path / "data.jsonl").write_text((json.dumps(columns) + "\n") * 2, "utf-8")
    rows = read_rows(str(tmp_path / "data.jsonl"), ChosenModel("somewhere"), NewFiles(tmp_path))
    assert (rows.prompt, rows.answer, rows.count) == (prompt, answer, 2)
    assert rows.chats == isinstance(columns[prompt], list)
    assert f"prompt: column {prompt!r}" in rows.summary


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([{"prompt": "a", "answer": "b"}, {"prompt": "c"}], "row 2 (line 2) has no column 'answer'"),
        ([{"prompt": "a"}, {"prompt": "c", "answer": "b"}], "has no column 'answer'"),
        (
            [{"prompt": "a", "answer": "b"}, {"prompt": "c", "answer": None}],
            "row 2 (line 2): the column 'answer' holds",
        ),
        ([{"prompt": "a", "answer": "b"}, {"prompt": "c", "answer": " "}], "which is no answer"),
        ([{"prompt": "a", "answer": "b"}, {"prompt": "", "answer": "b"}], "which is no prompt"),
        ([{"prompt": "a", "response": "b"}], "rename the column 'response'"),
        ([{"text": "a", "other": "b"}], "it has text, other: name the column by --prompt COLUMN"),
        ([{"messages": SAID}], "that do not end with the assistant's"),
        ([], "no rows"),
    ],
)
def test_rows_that_would_not_be_rewarded_are_refused_by_name(tmp_path: Path, lines: list[dict[str, Any]], said: str):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    with pytest.raises(UserError) as refusal:
        read_rows(str(path), ChosenModel("somewhere"), NewFiles(tmp_path))
    assert said in str(refusal.value)


def test_columns_that_are_named_are_taken(tmp_path: Path):
    (tmp_path / "data.jsonl").write_text(json.dumps({"text": "a", "prompt": "b", "gut": "1", "answer": "2"}), "utf-8")
    rows = read_rows(str(tmp_path / "data.jsonl"), ChosenModel("m"), NewFiles(tmp_path), "text", "gut")
    assert (rows.prompt, rows.answer, rows.answers) == ("text", "gut", ["1"])


def test_values_of_a_csv_stay_the_text_that_they_are(tmp_path: Path):
    rows = [["prompt", "answer", "n"], ['a "quoted", one', "012", "1.50"], ["zwei\nZeilen", "ä", ""]]
    with (tmp_path / "data.csv").open("w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file).writerows(rows)
    new = NewFiles(tmp_path / "run")
    found = read_rows(str(tmp_path / "data.csv"), ChosenModel("somewhere"), new)
    held = [json.loads(line) for line in (tmp_path / "run" / "train.jsonl").open(encoding="utf-8")]
    assert held == [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]
    assert (found.train, found.answers) == ("train.jsonl", ["012", "ä"])
    (tmp_path / "data.csv").write_text("prompt,answer\na\n")
    with pytest.raises(UserError, match="row 1 does not have as many values"):
        read_rows(str(tmp_path / "data.csv"), ChosenModel("somewhere"), new)


def test_files_of_a_directory_are_found_with_what_is_held_out(tmp_path: Path):
    import datasets

    row = json.dumps({"prompt": "a", "answer": "b"}) + "\n"
    for name in ("train-0.jsonl", "train-1.jsonl", "test-0.jsonl"):
        (tmp_path / name).write_text(row)
    found = read_rows(str(tmp_path), ChosenModel("somewhere"), NewFiles(tmp_path))
    assert (found.train, found.validation, found.count) == (["train-0.jsonl", "train-1.jsonl"], "test-0.jsonl", 2)
    (tmp_path / "my_train.jsonl").write_text(row)
    (tmp_path / "my_test.jsonl").write_text(row)
    assert (
        read_rows(str(tmp_path / "my_train.jsonl"), ChosenModel("m"), NewFiles(tmp_path)).validation == "my_test.jsonl"
    )
    split = datasets.Dataset.from_list([{"prompt": "a", "answer": "b"}])
    datasets.DatasetDict(train=split, test=split).save_to_disk(str(tmp_path / "saved"))
    found = read_rows(str(tmp_path / "saved"), ChosenModel("m"), NewFiles(tmp_path / "run"))
    assert (found.train, found.validation, found.answer) == ("train.parquet", "test.parquet", "answer")


ODD = (
    *("a: b", "# no comment", " leading", "ein Päckchen/ü ß 模型", 'it\'s "so"', "yes", "1e5", "- a", "{a: b}"),
    *("x" * 150, "word " * 40 + "end", "tab\there", "a\nb"),
)


@pytest.mark.parametrize("odd", ODD, ids=range(len(ODD)))
def test_a_commented_config_reads_back_equal_whatever_its_texts_are(odd: str):
    values = {
        "model": {"path": odd},
        "data": {"train": {odd: 1.0}, "prompt": odd, "max_prompt_tokens": 3},
        "reward": {"function": odd, "arguments": {odd: [odd, {"deep": odd}]}},
        "rollout": {"sampling": {"stop": [odd], "temperature": 1e-6}},
        "run": {"directory": odd},
    }
    written = write_commented(values, Config, {"model.path": odd, "run.directory": "why " * 60})
    assert parse(written, "here")[0] == values
    assert max(len(line) for line in written.splitlines() if line.lstrip().startswith("# why")) <= 104


def test_every_key_has_a_comment_and_the_schema_says_it(here: Path, models: Path):
    assert begin("--model", str(models / "chat"), "--data", "sorting", "--yes").exit_code == 0
    text = (here / "config.yaml").read_text()
    lines = text.splitlines()
    assert Config.model_fields["model"].annotation.model_fields["path"].description in text
    for number, line in enumerate(lines):
        if line.strip() in ("prompts_per_step: 4", "lr: 1.0e-06", "overlong_prompts: drop"):
            assert lines[number - 1].strip().startswith("#")


@pytest.mark.parametrize(
    ("texts", "first"),
    [
        (["42", "1,000", "-3.5"], "numeric"),
        (["so 6 * 7 is #### 42", "#### 1"], "numeric"),
        (["012345", "112233"], "exact_match"),  # as numbers, 12345 would be right
        (["0", "10"], "numeric"),
        (["Paris", "42"], "exact_match"),
        ([42, 43], "numeric"),
        ([r"\frac{1}{2}", "$x^2$"], "math"),
        (["word " * 40], "own"),
    ],
)
def test_the_reward_to_begin_with_is_told_by_the_answers(texts: list[Any], first: str):
    pytest.importorskip("math_verify")
    fitting = fitting_rewards(PromptData("a", None, answers=texts))
    assert next(iter(fitting)) == first
    assert not fitting[first]
    if "Paris" in texts:
        assert "'Paris'" in fitting["numeric"]


@pytest.mark.parametrize("reward", ["exact_match", "numeric", "own"])
@pytest.mark.parametrize(
    ("column", "value"),
    [
        *(("answer", "42"), ("answer", 42), ("ground truth", "42"), ("class", "42"), ("reward_model", "42")),
        *(("numeric", "42"), ("exact_match", 42), ("float", "42"), ("str", 42), ('a """', "42"), (None, None)),
    ],
)
def test_the_test_of_a_reward_passes_and_fails_where_the_reward_is_wrong(tmp_path, monkeypatch, reward, column, value):
    if column is None and reward != "own":
        with pytest.raises(ConfigError, match="no column with an answer"):
            read_reward(reward, PromptData("a", None, answer=None))
        return
    rows = PromptData("a", None, answer=column, columns=(column,) if column else (), answers=[value] if column else ())
    texts = reward_texts(rows, reward)

    def passes(reward_text: str) -> bool:
        module: dict[str, Any] = {}
        exec(compile(reward_text, "reward.py", "exec"), module)
        test = texts["test_reward.py"].replace("from reward import score", "")
        tested = {"score": module["score"]}
        exec(compile(test, "test_reward.py", "exec"), tested)
        try:
            tested["test_a_right_response_is_worth_more_than_a_wrong_one"]()  # type: ignore[operator]
        except AssertionError:
            return False
        return True

    assert passes(texts["reward.py"])
    assert not passes(texts["reward.py"].replace("return ", "return 0.0 * 0 and "))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "tinny"], "Error: --model: tinny does not exist"),
        (["--model", "acme/none-such"], "Error: --model: acme/none-such is no local path, and the hub"),
        (["--data", "sortin"], "Did you mean 'sorting'?"),
        (["--reward", "exactmatch"], "Did you mean 'exact_match'?"),
        (["--reward", "numeric", "--data", "texts"], "unknown data 'texts'"),
        (["--machine", "lap top"], "a number of GPUs such as 1 or 8"),
        (["--machine", "0"], "laptop"),
        (["--machine", "cluster"], "as 8@auto"),
        (["--machine", "8@head"], "16@10.0.0.1:6379"),
    ],
)
def test_what_cannot_be_is_refused_at_once_and_leaves_nothing(hub: Hub, here: Path, words: list[str], said: str):
    done = begin("new", *words, "--yes")
    assert done.exit_code == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not list(here.iterdir())


@pytest.mark.parametrize("name", WRITTEN)
def test_nothing_is_overwritten(here: Path, models: Path, name: str):
    (here / name).write_text("mine")
    done = begin("--model", str(models / "text"), "--yes")
    assert done.exit_code == 2
    assert f"{name} exists already" in done.stderr
    assert [entry.name for entry in here.iterdir()] == [name]
    assert (here / name).read_text() == "mine"


def test_nothing_is_written_through_a_link_that_leads_nowhere_yet(here: Path, models: Path):
    (here / "config.yaml").symlink_to(here / "elsewhere.yaml")
    done = begin("--model", str(models / "text"), "--yes")
    assert done.exit_code == 2
    assert "config.yaml exists already" in done.stderr
    assert [entry.name for entry in here.iterdir()] == ["config.yaml"]


def test_data_that_is_made_overwrites_nothing_either_and_is_taken_back(here: Path, models: Path):
    (here / "validation.jsonl").write_text("mine")
    done = begin("--model", str(models / "text"), "--yes")
    assert done.exit_code == 2
    assert "validation.jsonl exists already" in done.stderr
    assert [entry.name for entry in here.iterdir()] == ["validation.jsonl"]


def test_what_plan_refuses_is_taken_back(here: Path, models: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)  # as where people work
    (here / "long.jsonl").write_text(json.dumps({"prompt": "s1=" * 400, "answer": "1"}))
    done = begin("--model", str(models / "text"), "--data", "long.jsonl", "--yes")
    assert done.exit_code == 2
    assert "max_prompt_tokens" in done.stderr
    assert [entry.name for entry in here.iterdir()] == ["long.jsonl"]


def test_a_terminal_is_asked_again_until_an_answer_can_be(here: Path, models: Path):
    lines = ["nowhere", str(models / "text"), "texts.txt", "../texts.csv", "numric", "numeric", "two", ""]
    done = begin(answers="\n".join(lines) + "\n")
    assert done.exit_code == 0, done.output
    for said in ("nowhere does not exist", "there is no data file", "Did you mean 'numeric'?", "must be laptop"):
        assert said in done.stdout
    assert "prompt: column 'problem', text; answer: column 'answer'" in done.stdout
    assert "import numeric" in (here / "reward.py").read_text()


def test_a_terminal_is_asked_for_columns_that_are_called_oddly(here: Path, models: Path):
    rows = [{"conversation_log": f"what is {number}", "gold": str(number)} for number in range(9)]
    (here / "odd.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = [str(models / "text"), "odd.jsonl", "conversation", "odd.jsonl", "conversation_log", "numeric", ""]
    done = begin(answers="\n".join(lines) + "\n")
    assert done.exit_code == 0, done.output
    assert "no column of odd.jsonl is known to hold prompts" in done.stdout
    assert "prompt: column 'conversation_log', text; answer: column 'gold'" in done.stdout


def test_a_terminal_is_asked_for_the_column_of_answers(here: Path, models: Path):
    rows = [{"prompt": f"what is {number}", "right_one": str(number)} for number in range(9)]
    (here / "odd.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = begin(answers="\n".join([str(models / "text"), "odd.jsonl", "right_one", "numeric", ""]) + "\n")
    assert done.exit_code == 0, done.output
    assert "answer: column 'right_one'" in done.stdout


def test_a_missing_file_is_not_blamed_on_the_tiny_model(here: Path):
    done = begin("new", "--data", "missing.jsonl", "--yes")
    assert done.exit_code == 2
    assert "there is no data file missing.jsonl" in done.stderr
    assert not (here / "new").exists()


def test_without_a_terminal_what_is_not_said_is_asked_for_by_its_option(here: Path):
    done = begin(answers="")
    assert done.exit_code == 2
    assert "add --model, or --yes for tiny" in done.stderr


def test_a_name_on_the_hub_is_fetched_and_the_config_says_it(hub: Hub, here: Path, models: Path):
    hub.add_model("acme/small", models / "chat")
    done = begin("--model", "acme/small", "--data", "../texts.csv", "--yes")
    assert done.exit_code == 0, done.output
    config = load_config(here / "config.yaml")
    assert (config.model.path, config.data.chat_template) == ("acme/small", True)
    assert "model.safetensors" in hub.fetched()
    hub.close()
    with chdir(here):
        planned = CliRunner().invoke(main, ["plan", "config.yaml"])
    assert planned.exit_code == 0, planned.output


def test_a_gguf_file_is_begun_from(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from gguf_models import POSITIONS, write_gguf

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cached"))
    write_gguf(here / "small.gguf")
    done = begin("--model", "small.gguf", "--data", "../texts.csv", "--yes")
    assert done.exit_code == 0, done.output
    config = load_config(here / "config.yaml")
    assert (config.model.path, config.data.chat_template) == ("small.gguf", True)
    assert config.rollout.sampling.max_tokens == POSITIONS // 2
    (here / "small.gguf").write_bytes(b"GGUF")
    done = begin("new", "--model", "small.gguf", "--data", "../texts.csv", "--yes")
    assert done.exit_code == 2
    assert done.stderr.startswith("Error: --model: small.gguf is damaged or cut short")
    assert not (here / "new").exists()


def test_only_installed_engines_are_chosen_and_others_are_said_with_their_line(monkeypatch: pytest.MonkeyPatch):
    def installed(*names: str) -> None:
        entries = [EntryPoint(name, f"enginehouse_{name}.plugin", "enginehouse") for name in names]
        monkeypatch.setattr("enginehouse.plugin.plugins", lambda: load_plugins(entry_points=entries))

    installed("torch")
    chosen = choose_engines(read_machine("4"))
    assert (chosen.train, chosen.rollout) == ("torch", "torch")
    assert any("fsdp (pip install" in line for line in chosen.better)
    installed("torch", "fsdp", "vllm")
    chosen = choose_engines(read_machine("4"))
    assert (chosen.train, chosen.rollout) == ("fsdp", "vllm")
    assert choose_engines(read_machine("1")).train == "torch"
    assert choose_engines(read_machine("laptop")).better == ()
    monkeypatch.setattr("enginehouse.plugin.capabilities.SLEEP", "what none declares")
    assert choose_engines(read_machine("4")).rollout == "torch"
    monkeypatch.setattr("enginehouse_rl.plan.device.visible_gpus", lambda: 4)
    monkeypatch.setattr("enginehouse.runtimes.store.list_runtimes", list)
    with pytest.raises(ConfigError, match="must have 8 GPUs, but has 4: choose 4"):
        read_machine("8")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "reward"),
    [pytest.param(["train.steps=3", "cluster.launcher=inline"], 0.0, marks=pytest.mark.essential), ([], 0.75)],
    ids=["begins", "learns"],
)
def test_from_nothing_to_a_run_that_learns_within_five_minutes(tmp_path: Path, overrides: list[str], reward: float):
    began = time.monotonic()
    for words in (["init", "first run", "--yes"], ["train", "config.yaml", *overrides]):
        where = tmp_path if words[0] == "init" else tmp_path / "first run"
        program = [sys.executable, "-m", "enginehouse.cli.main", *words]
        done = subprocess.run(program, cwd=where, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr
    where = tmp_path / "first run"
    tested = subprocess.run([sys.executable, "-m", "pytest", "-q", "test_reward.py"], cwd=where, capture_output=True)
    assert tested.returncode == 0, tested.stdout
    assert time.monotonic() - began < 300
    rewards = [json.loads(line)["reward/mean"] for line in (where / "runs" / "first" / "metrics.jsonl").open()]
    assert sum(rewards[:5]) / 5 <= 0.10
    assert sum(rewards[-5:]) / 5 >= reward
