"""Runs that train the agents of examples/agents, unchanged, by a real engine."""

import json
import shutil
from pathlib import Path

import pytest

from enginehouse_recipes.chat import make_tokenizer
from enginehouse_recipes.sorting import make_model, write_lines

from .conftest import REPOSITORY, Start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CONFIG = Path("examples", "agents", "grpo.yaml")


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


@pytest.mark.parametrize(
    ("agent", "processes"),
    [("client_agent", 1), ("library_agent", 0)],
)
def test_an_agent_of_the_examples_is_trained(house: Path, start: Start, agent: str, processes: int):
    shutil.copytree(REPOSITORY / CONFIG.parent, house / CONFIG.parent, dirs_exist_ok=True)
    task = house / "runs/recipes/chat"
    make_model(task / "model", tokenizer=make_tokenizer(), positions=512)
    products = ((first, second) for first in range(10, 14) for second in range(20, 24))
    rows = ({"prompt": [user(f"What is {a} * {b}")], "answer": str(a * b)} for a, b in products)
    write_lines(task / "calculator.jsonl", rows)
    run = start(
        "train", f"environment.arguments.agent={agent}:solve", f"environment.processes={processes}", "train.steps=2",
        "model.path=runs/recipes/chat/model", "data.validation=null", "train.prompts_per_step=4",
        "rollout.samples_per_prompt=4", "rollout.sampling.max_tokens=8", "train.samples_every=1",
        "cluster.threads_per_process=1", config=CONFIG,
    )  # fmt: skip
    ended = run.finished()
    assert ended.err == ""
    assert len(run.metrics) == 2
    for step in run.metrics:
        assert step["reward/calls"] >= step["reward/segments"] == 1.0
        assert step["reward/edits"] == step["feed/failed_error"] == 0.0
    samples = [json.loads(line) for line in (run.directory / "samples/step-000002.jsonl").read_text().splitlines()]
    assert all("What is " in one["prompt"] for one in samples)
    assert all("calculator(expression)" in one["prompt"] for one in samples)
