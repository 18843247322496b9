"""`enginehouse sft`: the same checks on a supervised config."""

from pathlib import Path

import pytest
from click.testing import CliRunner
from projects import Project

from enginehouse.cli.main import main


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.chdir(tmp_path)
    project = Project(tmp_path)
    project.save_sft()
    return project


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("rollout.replicas=2", "unknown key 'rollout'"),
        ("train.rows_per_step=none", "train.rows_per_step (in the override"),
        ("data.response=answer", "demonstrations.jsonl has no column 'answer'"),
        ("actor.processes=9", "a step has 8 rows"),
        ("model.path=nowhere", "nowhere does not exist"),
        ("actor.engine.options.lrr=1", "unknown key 'actor.engine.options.lrr'. Did you mean 'lr'?"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(project: Project, override: str, said: str):
    done = CliRunner().invoke(main, ["sft", "sft.yaml", override])
    assert done.exit_code == 2
    assert said in done.stderr
    assert not (project.root / "runs").exists()
