"""`make test-gpu`: what it writes, and when it says that all is well. Its steps themselves need a GPU."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner
from projects import Project, project  # noqa: F401 - a fixture
from tools import gpu
from tools.gpu import Step, run_all, steps

from enginehouse.cli.main import main


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    gpu.WORK.mkdir(parents=True)


def written(*chosen: Step, minutes: float = 1.0) -> tuple[bool, dict[str, dict[str, object]]]:
    path = Path("results/some-gpu.json")
    passed = run_all(chosen, {"device": "Some GPU"}, path, minutes)
    content = json.loads(path.read_text())
    assert content["device"] == "Some GPU"
    return passed, content["steps"]


def test_figures_decide_where_a_command_ends_well():
    def reading(value: float) -> Step:
        return Step("read", "true", 10, lambda: {"speed": value}, least={"speed": 0.95}, most={"speed": 1.05})

    passed, rows = written(reading(1.0))
    assert passed
    assert rows["read"]["figures"] == {"speed": 1.0}
    for wrong, said in ((0.9, "speed is 0.9, not at least 0.95"), (1.1, "not at most 1.05"), (float("nan"), "nan")):
        passed, rows = written(reading(wrong))
        assert not passed
        assert said in rows["read"]["problems"][0]
    passed, rows = written(Step("read", "true", 10, dict, least={"speed": 0.95}))
    assert rows["read"]["problems"] == ["speed is None, not at least 0.95"]


def test_what_fails_hangs_or_leaves_nothing_is_said_and_the_rest_is_run():
    passed, rows = written(
        Step("fails", "echo why; exit 3", 10),
        Step("hangs", "sleep 60 & sleep 60", 0.2),
        Step("leaves nothing", "true", 10, lambda: gpu.last_metrics(Path("nowhere"), [])),
        Step("works", "enginehouse --help", 30),
    )
    assert not passed
    assert rows["fails"]["exit_code"] == 3
    assert "why" in str(rows["fails"]["end_of_output"])
    assert rows["hangs"]["problems"] == ["it was ended after 0 s"]
    assert "its figures cannot be read: FileNotFoundError" in str(rows["leaves nothing"]["problems"])
    assert rows["works"]["passed"]


def test_what_there_is_no_time_for_is_said_not_to_have_run():
    passed, rows = written(Step("late", "true", 10), minutes=0.1)
    assert not passed
    assert rows["late"]["problems"] == ["not run: no time was left"]


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(gpu, "interpreters", dict)
    assert gpu.main([]) == 2
    assert "no GPU that torch can use is visible here" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", [step.name for step in steps(gpu.MODEL) if " examples/quickstart/grpo.yaml" in step.command]
)
def test_the_runs_it_makes_can_start_on_one_gpu(name: str, project: Project, monkeypatch: pytest.MonkeyPatch):  # noqa: F811
    monkeypatch.setenv("ENGINEHOUSE_RUNTIMES", "runtimes")
    shape = {
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "tie_word_embeddings": True,
        "max_position_embeddings": 40960,
    }  # fmt: skip
    project.make_model(str(gpu.MODEL), **shape)
    gpu.TASK.mkdir()
    (gpu.TASK / "train.jsonl").write_bytes((project.root / "train.jsonl").read_bytes())
    (step,) = [step for step in steps(gpu.MODEL) if step.name == name]
    _, _, config, *overrides = shlex.split(step.command.partition(" --")[0])
    asked = ["plan", str(gpu.ROOT / config), *overrides, "--gpus", "1", "--gpu", "H100"]
    result = CliRunner().invoke(main, asked)
    assert result.exit_code == 0, result.output
    assert ("taking turns with the actor" in result.output) is (name not in ("in one process", "long passes"))


def test_nothing_that_is_written_names_a_place_of_the_machine():
    for step in steps(gpu.MODEL):
        assert not any(word.startswith("/") or "=/" in word for word in shlex.split(step.command)), step.command
