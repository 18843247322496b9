"""The agents of examples/agents, through the endpoint, by a scripted policy: they are trained in test_agents.py."""

import re
from pathlib import Path

import pytest
from agent_plays import Scripted, assert_as_drawn, play
from chat_templates import make_tokenizer

from enginehouse.engines.environment import Task
from enginehouse_environments.agents import OpenAIAgent
from enginehouse_rewards.program import RowScore

EXAMPLES = Path(__file__).parents[2] / "examples" / "agents"
AGENTS = ["client_agent", pytest.param("library_agent", marks=pytest.mark.slow)]  # the library is slow to import


def called(expression: str) -> str:
    return f'<tool_call>\n{{"name": "calculator", "arguments": {{"expression": "{expression}"}}}}\n</tool_call>'


def scored(response, answer, **rest):
    return RowScore(float(response == answer), {})


def says_what_the_tool_gave(text: str, number: int) -> str:
    results = re.findall(r"<tool_response>\n(.*)\n</tool_response>", text)
    return results[-1] if results else called("12 * 34")


@pytest.mark.parametrize("name", AGENTS)
@pytest.mark.parametrize(
    ("script", "reward", "calls"),
    [
        (says_what_the_tool_gave, 1.0, 2),
        (lambda text, number: "408", 1.0, 1),
        (lambda text, number: called("12 +"), 0.0, 3),
        (lambda text, number: called("12 * 34").replace("calculator", "other"), 0.0, None),
        (lambda text, number: "", 0.0, 1),
    ],
    ids=["calls", "answers", "calls wrongly, again and again", "calls another tool", "says nothing"],
)
def test_an_example_plays(name, script, reward, calls, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    fleet = Scripted(make_tokenizer(), script)
    messages = [{"role": "user", "content": "What is 12 * 34"}]
    task = Task(0, [1], "What is 12 * 34", messages, {"answer": "408"})
    (episode,) = play(OpenAIAgent(f"{name}:solve"), fleet, task, score=scored)
    assert episode.score.reward == reward
    assert calls in (None, episode.score.figures["calls"])
    assert not episode.earlier
    assert_as_drawn([episode], fleet)


def test_the_agent_of_the_page_plays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    page = (EXAMPLES.parents[1] / "docs" / "environments" / "agents.md").read_text(encoding="utf-8")
    (source,) = re.findall(r"^```python\n(# my_agent.py\n.*?)^```", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "my_agent.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    fleet = Scripted(make_tokenizer(), lambda text, number: "408")
    task = Task(0, [1], "What is 12 * 34", None, {"answer": "408"})
    (episode,) = play(OpenAIAgent("my_agent:solve"), fleet, task, score=scored)
    assert episode.score.reward == 1.0
