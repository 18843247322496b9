"""Benchmarks by the commands: answered by `eval` and while training, their figures, and their commits."""

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from benchmark_items import make_data_set
from click.testing import CliRunner
from hub_server import Hub

from enginehouse.cli.main import main
from enginehouse_rl.benchmarks.names import BENCHMARKS
from enginehouse_rl.hub import snapshots
from enginehouse_testing.models import tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.benchmarks, pytest.mark.timeout(600)]

INLINE = ("cluster.device=cpu", "cluster.launcher=inline")
SHORT = ("evaluation.max_prompts=3", "evaluation.sampling.max_tokens=6")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def add(hub: Hub, *names: str) -> dict[str, str]:
    """Serve the data sets of benchmarks; return their commits."""
    return {name: hub.add_dataset(BENCHMARKS[name].repository, make_data_set(name)) for name in names}


def run(*words: str) -> str:
    done = CliRunner().invoke(main, list(words))
    assert done.exit_code == 0, (done.output, done.exception)
    return done.output


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_model_is_evaluated_by_its_name_alone(hub: Hub, here: Path):
    commits = add(hub, "gsm8k", "aime24")
    drawn = ("evaluation.samples_per_prompt=2", "evaluation.sampling.temperature=1")
    model = tiny_model(max_positions=4096)
    output = run("eval", model, "--benchmark", "gsm8k,aime24", *SHORT, *drawn, "run.directory=out", *INLINE)
    assert "gsm8k" in output
    [figures] = lines(here / "out" / "validation.jsonl")
    rows = lines(here / "out" / "samples" / "validation-000000.jsonl")
    for name in ("gsm8k", "aime24"):
        own = [row for row in rows if row["file"] == name]
        assert len(own) == 6
        reward = statistics.fmean(row["reward"] for row in own)
        assert figures[f"validation/{name}/reward"] == figures[f"validation/{name}/mean@2"] == pytest.approx(reward)
        assert {f"validation/{name}/{figure}" for figure in ("reward_stderr", "pass@2", "pass@2_stderr")} <= set(
            figures
        )
    assert "validation/gsm8k/exact_match.strict-match" in figures
    written = yaml.safe_load((here / "out" / "config.yaml").read_text())
    assert written["evaluation"]["benchmarks"] == [f"{name}@{commit}" for name, commit in commits.items()]
    record = json.loads((here / "out" / "run.json").read_text())
    assert [(entry["name"], entry["commit"]) for entry in record["hub"]] == [
        (BENCHMARKS[name].repository, commit) for name, commit in commits.items()
    ]


@pytest.fixture
def config(here: Path) -> Path:
    """A config of two steps, with held-out prompts of its own."""
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(8)]
    for name in ("train", "held_out"):
        (here / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    content = {
        "model": {"path": tiny_model(max_positions=4096)},
        "data": {"train": "train.jsonl", "validation": "held_out.jsonl", "max_prompt_tokens": 16},
        "reward": {"function": "numeric"},
        "rollout": {"samples_per_prompt": 2, "sampling": {"max_tokens": 4, "stop": ["7"]}},
        "evaluation": {"benchmarks": ["aime24"], "max_prompts": 3},
        "train": {"steps": 1, "prompts_per_step": 2, "checkpoint_every": 1, "save_best": "validation/aime24/reward"},
        "cluster": {"device": "cpu"},
        "run": {"directory": "runs/one"},
    }
    (here / "run.yaml").write_text(yaml.safe_dump(content))
    return here / "run.yaml"


def test_a_run_is_measured_by_benchmarks_and_goes_on_with_their_commits(hub: Hub, config: Path):
    commit = add(hub, "aime24")["aime24"]
    plain = [*SHORT, "cluster.launcher=inline"]
    run("train", "run.yaml", *plain, "evaluation.benchmarks=[]", "run.directory=runs/plain", "train.save_best=null")
    run("train", "run.yaml", *plain)
    measured, others = (lines(Path(f"runs/{name}/validation.jsonl")) for name in ("one", "plain"))
    assert [row["step"] for row in measured] == [0, 1]
    for row, other in zip(measured, others, strict=True):
        assert 0 <= row["validation/aime24/reward"] <= 1
        assert row["validation/aime24/dropped"] == 0
        assert row["validation/reward"] == other["validation/reward"]
    files = make_data_set("aime24") | {"README.md": b"moved"}
    hub.add_dataset(BENCHMARKS["aime24"].repository, files)
    snapshots._fetched.clear()
    assert f"{BENCHMARKS['aime24'].repository} at {commit}" in run(
        "plan", "run.yaml", "--resume", "train.steps=2", *plain
    )
    run("train", "run.yaml", "--resume", "train.steps=2", *plain)
    assert [row["step"] for row in lines(Path("runs/one/validation.jsonl"))] == [0, 1, 2]


def test_environments_of_their_own_and_in_processes_of_their_own_leave_benchmarks_alone(hub: Hub, config: Path):
    add(hub, "aime24")
    run("eval", "run.yaml", *SHORT, "cluster.launcher=inline", "run.directory=runs/together")
    run("eval", "run.yaml", *SHORT, "environment.processes=1", "run.directory=runs/apart")
    together, apart = (lines(Path(f"runs/{name}/validation.jsonl")) for name in ("together", "apart"))
    assert together == apart


def test_a_model_with_too_little_room_is_told_so(hub: Hub, here: Path):
    add(hub, "aime24", "gsm8k")
    model = tiny_model(max_positions=128)
    output = run("eval", model, "--benchmark", "aime24", "evaluation.max_prompts=3", *INLINE, "run.directory=out")
    assert "tokens instead of 32,768" in output
    done = CliRunner().invoke(main, ["eval", model, "--benchmark", "gsm8k", *INLINE])
    assert done.exit_code == 2
    assert "a prompt of gsm8k has" in done.stderr
    assert "but the model reads at most 128" in done.stderr
