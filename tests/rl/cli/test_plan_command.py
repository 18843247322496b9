"""`enginehouse plan`: exit code 0 and the plan, or 2 and what is wrong. Nothing is started or written."""

import io
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from projects import Project

from enginehouse.cli.console import show_what_is_checked
from enginehouse.cli.main import main
from enginehouse.plugin import load_plugins
from enginehouse_rl.config.load import load_config
from enginehouse_rl.plan.plan import plan
from enginehouse_rl.runs import RunDirectory


def enginehouse(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in `directory`; it reports on stderr which heavy modules it imported."""
    code = (
        "import atexit, sys\n"
        "heavy = lambda: [name for name in ('torch', 'ray') if name in sys.modules]\n"
        "atexit.register(lambda: print('IMPORTED', *heavy(), file=sys.stderr))\n"
        "from enginehouse.cli.main import main\n"
        f"main({list(arguments)!r}, prog_name='enginehouse')\n"
    )
    environment = {**os.environ, "ENGINEHOUSE_PLUGINS": "torch", "COLUMNS": "200"}
    return subprocess.run([sys.executable, "-c", code], cwd=directory, env=environment, capture_output=True, text=True)


@pytest.fixture
def project(tmp_path: Path) -> Project:
    made = Project(tmp_path)
    made.write_tokenizer()
    return made


def test_it_says_what_would_happen_and_starts_nothing(project: Project):
    project.save()
    done = enginehouse(project.root, "plan", "grpo.yaml", "train.steps=7")
    assert done.returncode == 0, done.stderr
    assert "7 steps, an optimizer step each" in done.stdout
    assert done.stderr == "IMPORTED torch\n"  # the tokenizer is loaded to show the first row
    assert not (project.root / "runs").exists()


@pytest.mark.parametrize("encoding", ["latin-1", "gbk"])
def test_an_output_that_lacks_a_character_gets_another(project, monkeypatch, encoding):
    project.save()
    monkeypatch.chdir(project.root)
    done = CliRunner(charset=encoding).invoke(main, ["plan", "grpo.yaml", "run.directory=runs/\U0001f600"])
    assert done.exit_code == 0, done.output
    assert "runs/?" in done.output


def test_it_checks_supervised_configs_too(project: Project):
    project.save_sft()
    done = enginehouse(project.root, "plan", "--sft", "sft.yaml")
    assert done.returncode == 0, done.stderr
    assert "40 demonstrations" in done.stdout


BAD_INPUT = pytest.mark.parametrize(
    ("override", "said"),
    [
        ("rollot.replicas=2", "unknown key 'rollot' (in the override 'rollot.replicas=2'). Did you mean 'rollout'?"),
        ("rollout.engine.backend=vlmm", "unknown rollout engine 'vlmm'"),
        ("algorithm.minibatches=100", "a step has 32 samples"),
        ("data.train=trian.jsonl", "no data file trian.jsonl; the nearest in"),
        ("model.path=modell", "modell does not exist"),
    ],
)


@BAD_INPUT
def test_bad_input_is_refused(project: Project, monkeypatch: pytest.MonkeyPatch, override: str, said: str):
    monkeypatch.chdir(project.root)
    project.save()
    done = CliRunner().invoke(main, ["plan", "grpo.yaml", override])
    assert done.exit_code == 2
    assert said in done.stderr


@BAD_INPUT
def test_training_on_bad_input_starts_nothing(project: Project, override: str, said: str):
    project.save()
    done = enginehouse(project.root, "train", "grpo.yaml", override)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert done.stderr.endswith("IMPORTED\n")
    assert not (project.root / "runs").exists()


def test_a_missing_config_is_named_with_the_nearest(project: Project):
    project.save()
    done = enginehouse(project.root, "plan", "grop.yaml")
    assert done.returncode == 2
    assert "config file grop.yaml not found. Did you mean 'grpo.yaml'?" in done.stderr


def test_it_says_whether_a_run_could_be_resumed(project: Project):
    project.save()
    done = enginehouse(project.root, "plan", "grpo.yaml", "--resume")
    assert done.returncode == 2
    assert "--resume: there is no run in" in done.stderr


@pytest.mark.parametrize(("kind", "save"), [("train", Project.save), ("sft", Project.save_sft)])
def test_a_directory_with_a_run_is_what_it_says_first_with_the_exit_code_of_train(project, monkeypatch, kind, save):
    monkeypatch.chdir(project.root)
    given = [save(project).name, "run.directory=runs/one"]
    record = project.root / "runs/one/run.json"
    record.parent.mkdir(parents=True)
    record.write_text("{}")
    option = ["--sft"] if kind == "sft" else []

    done = CliRunner().invoke(main, ["plan", *option, *given])
    assert done.exit_code == 2
    first, second = done.stdout.splitlines()[:2]
    assert first.startswith(f"Cannot start: run.directory: {record.parent} already contains a run. Choose another")
    assert second.startswith("model "), "the rest of the plan is there all the same"
    started = CliRunner().invoke(main, [kind, *given])
    assert (started.exit_code, started.stderr) == (2, f"Error: {first.removeprefix('Cannot start: ')}\n")
    free = CliRunner().invoke(main, ["plan", *option, *given, "run.directory=runs/two"])
    assert (free.exit_code, free.stdout[:4]) == (0, "OK: ")

    others = CliRunner().invoke(main, ["plan", *option, *given, "run.directory=model"])
    assert others.exit_code == 2
    assert "was not made by a run" in others.stderr


def test_an_unfinished_run_that_a_file_would_overwrite_stops_the_plan_as_it_stops_train(project, monkeypatch):
    monkeypatch.chdir(project.root)
    project.config["run"] = {"directory": "runs/one", "overwrite": True}
    path = project.save().name
    run = RunDirectory.create("runs/one", "")
    run.finish("failed")
    (run.path / "checkpoints" / "step-000002").mkdir(parents=True)
    planned, started = (CliRunner().invoke(main, [command, path]) for command in ("plan", "train"))
    assert (planned.exit_code, started.exit_code) == (2, 2)
    assert planned.stdout.startswith(f"Cannot start: run.overwrite: {run.path} contains an unfinished run (")
    assert started.stderr == f"Error: {planned.stdout.splitlines()[0].removeprefix('Cannot start: ')}\n"
    assert CliRunner().invoke(main, ["plan", path, "run.overwrite=true"]).exit_code == 0


def test_a_terminal_shows_what_is_looked_at_and_then_no_longer(project: Project, monkeypatch):
    project.save()
    monkeypatch.chdir(project.root)
    checks, stream = logging.getLogger("enginehouse.plugin.findings"), io.StringIO()
    for attribute, value in (("handlers", []), ("propagate", True), ("level", logging.NOTSET)):
        monkeypatch.setattr(checks, attribute, value)
    monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", stream)
    show_what_is_checked()
    plan(load_config("grpo.yaml"), load_plugins(enabled=("torch",)), "grpo.yaml", starts=False)
    shown = stream.getvalue().split("\r\x1b[2K")
    assert "Reading train.jsonl ..." in shown
    assert "Looking at the prompts of train.jsonl ..." in shown
    assert shown[-1] == ""


def test_help_names_each_kind_of_gpu_that_a_plan_can_be_made_for():
    from enginehouse_rl.cli.plan import GPU_KINDS
    from enginehouse_rl.plan.device import GPUS_GIB

    assert set(GPU_KINDS.replace(" or ", ", ").split(", ")) == set(GPUS_GIB)
