"""The adapter of `verifiers`, on a stand-in of that package with just what the adapter uses.

The package itself (0.4.0) needs another `openai` than the other tests. docs/environments/games.md says what was run
with it.
"""

import sys
from pathlib import Path

import pytest
from agent_plays import Scripted, play
from chat_templates import make_tokenizer

from enginehouse.engines.environment import Task
from enginehouse.errors import ConfigError, UserError
from enginehouse_environments.verifiers import Verifiers
from enginehouse_rl.episodes.failures import EpisodeFailed

STAND_IN = '''
import contextlib, dataclasses, itertools, types
import httpx


@dataclasses.dataclass(frozen=True)
class EvalClientConfig:
    base_url: str
    api_key_var: str


@dataclasses.dataclass(frozen=True)
class ModelContext:
    model: str
    client: EvalClientConfig


class Env:
    """Asks each of two agents, one of which is not trained, and rewards what is the task's answer."""

    taskset = [f"task {number}" for number in range(3)]
    served = 0
    numbers = itertools.count()

    def __init__(self, config):
        self.config = config

    @contextlib.asynccontextmanager
    async def serving(self):
        Env.served += 1
        yield

    async def run_episode(self, task, ctx, on_trace):
        traces = []
        for trainable in (True, False):
            trace = types.SimpleNamespace(
                id=f"trace-{next(self.numbers)}", agent=types.SimpleNamespace(trainable=trainable),
                metrics={"words": None, "turns": 1}, errors=[],
            )
            on_trace(trace)
            headers = {"authorization": "Bearer EMPTY", "x-session-id": trace.id}
            asked = {"model": ctx.model, "messages": [{"role": "user", "content": task}]}
            async with httpx.AsyncClient(verify=False, headers=headers) as http:
                answer = await http.post(f"{ctx.client.base_url}/chat/completions", json=asked)
            if task == "task 2":
                trace.errors.append(types.SimpleNamespace(type="TaskError", message="no"))
                return types.SimpleNamespace(ok=False, errors=[], traces=[trace])
            said = answer.json()["choices"][0]["message"]["content"]
            trace.reward = float(said == self.config["taskset"].get("answer")) if trainable else 9.0
            traces.append(trace)
        return types.SimpleNamespace(ok=True, errors=[], traces=traces)
'''

LOADERS = """
from verifiers.v1 import Env

def resolve_env_config(data):
    if data["taskset"]["id"] != "mine":
        raise ModuleNotFoundError(f"taskset {data['taskset']['id']!r} not found")
    return data

load_environment = Env
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = tmp_path / "verifiers" / "v1"
    (package / "utils").mkdir(parents=True)
    for place in (package.parent, package / "utils"):
        (place / "__init__.py").touch()
    (package / "__init__.py").write_text(STAND_IN)
    (package / "utils" / "loaders.py").write_text(LOADERS)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "verifiers"]:
        del sys.modules[name]


def played(task: int = 1, **given):
    fleet = Scripted(make_tokenizer(), lambda text, number: "right")
    environment = Verifiers("mine", {"taskset": {"answer": "right"}}, **given)
    return play(environment, fleet, Task(0, [1], "", None, {"task": task}), samples=3), fleet


@pytest.mark.usefixtures("stand_in")
def test_a_taskset_is_played_by_its_harness_and_scored_by_itself():
    episodes, _ = played()
    assert [one.score.reward for one in episodes] == [1.0] * 3
    assert episodes[0].score.figures == {"calls": 2, "segments": 1, "edits": 0, "turns": 1.0}
    assert "user\ntask 1<|im_end|>" in episodes[0].prompt
    assert [sum(one.mask) for one in episodes] == [len("right") + 1] * 3  # what the other agent asked is in none
    assert sys.modules["verifiers.v1"].Env.served == 1


@pytest.mark.usefixtures("stand_in")
def test_an_episode_that_failed_says_why():
    with pytest.raises(EpisodeFailed, match=r"failed: an episode of verifiers failed: TaskError: no"):
        played(2)


@pytest.mark.usefixtures("stand_in")
def test_a_row_names_a_task_of_the_taskset():
    with pytest.raises(UserError, match=r"the column 'task' .* must hold the index of a task, 0 to 2, not 3"):
        played(3)


def test_plan_refuses_a_taskset_that_there_is_not(request: pytest.FixtureRequest):
    with pytest.raises(ConfigError, match=r"verifiers is not installed. Try: pip install 'verifiers>=0.4,<0.5'"):
        Verifiers.check({"taskset": "mine"}, None)
    request.getfixturevalue("stand_in")
    with pytest.raises(ConfigError, match="taskset: 'other' of verifiers cannot be loaded: taskset 'other' not found"):
        Verifiers.check({"taskset": "other"}, None)
    Verifiers.check({"taskset": "mine"}, None)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(("given", "name"), [({}, "task"), ({"column": "number"}, "number")])
def test_plan_refuses_rows_that_name_no_task(given: dict[str, str], name: str):
    with pytest.raises(ConfigError, match=rf"column: the data has no column {name!r} .*\. Available: prompts, row"):
        Verifiers.check({"taskset": "mine", **given}, ["row", "prompts"])
    Verifiers.check({"taskset": "mine", **given}, ["row", name])
