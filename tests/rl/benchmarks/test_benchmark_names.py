"""Benchmarks by name: each mistake is one line, with its cure, before anything starts. Without lm-eval itself."""

import importlib.util
from pathlib import Path

import pytest
from benchmark_items import make_data_set
from click.testing import CliRunner
from hub_server import TOKEN, Hub

from enginehouse.cli.main import main
from enginehouse_rl.benchmarks.names import list_benchmarks
from enginehouse_rl.config.load import make_config
from enginehouse_testing.models import tiny_model


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("enginehouse_rl.plan.parts.hub.check_installed", lambda names: None)


def refused(benchmarks: str) -> str:
    """Return the one line by which an evaluation of a model refuses, with exit code 2."""
    done = CliRunner().invoke(main, ["eval", tiny_model(), "--benchmark", benchmarks, "cluster.device=cpu"])
    assert done.exit_code == 2, (done.output, done.exception)
    (line,) = [line for line in done.stderr.splitlines() if line.strip()]
    return line


def test_a_name_may_stand_for_several_and_be_of_a_revision():
    assert [str(name) for name in list_benchmarks(["aime", "gsm8k@v1", "aime24"])] == ["aime24", "aime25", "gsm8k@v1"]
    config = make_config({"model": {"path": "m"}, "data": {"train": "t.jsonl"}}, ["evaluation.benchmarks=[aime]"])
    assert config.evaluation.benchmarks == ["aime24", "aime25"]


def test_a_wrong_name_is_told_the_nearest():
    line = refused("gsmk8,aime")
    assert "unknown benchmark 'gsmk8'. Did you mean 'gsm8k'?" in line
    assert "evaluation.benchmarks" in line
    assert "write aime24@REVISION, aime25@REVISION" in refused("aime@main")
    assert "gsm8k must not have two revisions: gsm8k@a and gsm8k@b" in refused("gsm8k@a,gsm8k@b")


def test_a_package_that_is_missing_is_named_with_its_cure(monkeypatch: pytest.MonkeyPatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "lm_eval" else found(name))
    line = refused("gsm8k")
    assert line.endswith("the benchmark gsm8k needs lm_eval: pip install 'enginehouse-rl[benchmarks]'")


@pytest.mark.usefixtures("installed")
def test_a_data_set_that_cannot_be_had_is_one_line(hub: Hub, monkeypatch: pytest.MonkeyPatch):
    hub.add_dataset("Idavidrein/gpqa", make_data_set("gpqa"))
    hub.datasets["Idavidrein/gpqa"].gated = True
    line = refused("gpqa")
    assert "evaluation.benchmarks.gpqa: the data set Idavidrein/gpqa is gated: ask for access at" in line
    assert "set HF_TOKEN" in line
    assert TOKEN not in line
    assert "the hub" in refused("gsm8k")
    assert "has no revision 'v9' on the hub" in refused("gpqa@v9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    line = refused("math500")
    assert "HF_HUB_OFFLINE is set; no revision is cached" in line
    assert "hf download HuggingFaceH4/MATH-500 --repo-type dataset" in line
