"""docs/environments: the examples are planned and played."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from chat_fleets import ChatFleet, play
from chat_templates import QWEN, make_tokenizer
from plugin_pages import blocks
from projects import Project

from enginehouse.engines.environment import Task
from enginehouse.errors import ConfigError
from enginehouse_environments.tools import Tools
from enginehouse_rl.plan.plan import Plan

FOLDER = Path(__file__).parents[2] / "docs" / "environments"


def block(page: str, section: str, language: str) -> str:
    """The first block of a section in a language."""
    text = (FOLDER / f"{page}.md").read_text(encoding="utf-8")
    return blocks(text[text.index(f"\n## {section}\n") :], language)[0]


@pytest.fixture
def tools(project: Project, monkeypatch: pytest.MonkeyPatch) -> Project:
    """The project of the page on tools, but for the model."""
    module = ModuleType("my_tools")
    exec(block("tools", "A complete example", "python"), module.__dict__)
    monkeypatch.setitem(sys.modules, "my_tools", module)
    project.write_rows("fruit.jsonl", [json.loads(block("tools", "A complete example", "json"))] * 40)
    project.config = yaml.safe_load(block("tools", "A complete example", "yaml"))
    tokenizer = make_tokenizer(QWEN)
    project.config["model"]["path"] = "small"
    tokenizer.save_pretrained(project.make_model("small", vocab_size=len(tokenizer), max_position_embeddings=2048))
    return project


def planned(project: Project, *overrides: str) -> Plan:
    return project.planned(*overrides, enabled=("torch", "environments"))


def test_the_example_of_tools_is_planned(tools: Project):
    made = planned(tools)
    assert made.environment.reference == "enginehouse_environments.tools:Tools"
    assert made.environment.arguments["tools"] == ["calculator", "my_tools:price"]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("tools=[calculater]", r"environment\.arguments: tools: unknown tool 'calculater'. Did you mean"),
        ("tools=[]", r"environment\.arguments\.tools"),
        ("tools=[\"my_tools:prize\"]", r"environment\.arguments: tools: module 'my_tools' has no 'prize'"),
        ("tools=calculator", r"environment\.arguments\.tools: expected a list"),
        ("tools=[3]", r"environment\.arguments\.tools: expected a string"),
        ("max_turns=0", r"environment\.arguments\.max_turns"),
    ],
)  # fmt: skip
def test_arguments_that_will_not_do_are_refused_by_the_plan(tools: Project, override: str, said: str):
    with pytest.raises(ConfigError, match=said):
        planned(tools, f"environment.arguments.{override}")


@pytest.fixture
def questions(tools: Project) -> Project:
    """The project of the section on reasoning_gym, whose rows are made by the commands there."""
    pytest.importorskip("reasoning_gym")
    example = block("games", "reasoning_gym", "yaml")
    for command in re.findall(r"jsonl +# (.*)", example):
        subprocess.run(["bash", "-c", command], cwd=tools.root, check=True)
    tools.config = {"model": tools.config["model"], "train": tools.config["train"]} | yaml.safe_load(example)
    return tools


def test_the_example_of_reasoning_gym_is_planned(questions: Project):
    made = planned(questions)
    assert made.environment.reference == "enginehouse_environments.reasoning_gym:ReasoningGym"
    assert len((questions.root / "validation.jsonl").read_text().splitlines()) == 200


def test_a_task_that_reasoning_gym_does_not_have_is_refused_by_the_plan(questions: Project):
    with pytest.raises(ConfigError, match=r"reasoning_gym has no task 'chain_sums'. Did you mean 'chain_sum'\?"):
        planned(questions, "environment.arguments.tasks=[chain_sums]")


def test_the_example_of_tools_is_played(tools: Project):
    made = planned(tools)
    row = json.loads(block("tools", "A complete example", "json"))

    def called(name: str, **arguments: str) -> str:
        return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"

    answers = [
        called("price", fruit="apple") + called("price", fruit="pear"),
        called("calculator", expression="4 * 3 + 3 * 4"),
        "24",
    ]
    fleet = ChatFleet(make_tokenizer(QWEN), answers)
    (episode,) = play(Tools(**made.environment.arguments), fleet, Task(1, [1], "", row["prompt"], {}))
    assert [part.split("\n")[1] for part in episode.response.split("<tool_response>")[1:]] == ["3", "4", "24"]
    assert episode.score.figures["tool_errors"] == 0
