"""The page at a run's end: there however the run ended, and never a reason for another end."""

import json
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
from click.testing import CliRunner
from projects import QUICK_TRAINER, Project, project  # noqa: F401 - a fixture
from report_runs import page_of

from enginehouse.cli.interrupts import KEY_ECHO_SECONDS
from enginehouse.cli.main import main
from enginehouse.plugin import plugins
from enginehouse_report import plugin as ours


@pytest.fixture
def train(project: Project, monkeypatch: pytest.MonkeyPatch):  # noqa: F811 - it is the fixture
    """Runs `enginehouse sft` with a trainer that takes one step and then does what it is told."""
    project.save_sft()
    monkeypatch.chdir(project.root)

    def train(then=lambda: None, *arguments: str):
        class Quick:
            def __init__(self, plan, run, progress):
                self.directory = run

            def run(self):
                self.directory.log(1, {"loss": 1.5})
                then()

        monkeypatch.setitem(sys.modules, "enginehouse_rl.loop.sft", types.SimpleNamespace(SFTTrainer=Quick))
        return CliRunner().invoke(main, ["sft", "sft.yaml", *arguments])

    return train


def raising(error: BaseException):
    def raise_it():
        raise error

    return raise_it


def page() -> dict:
    return page_of(Path("runs/warm/report.html")).blocks["main"]["runs"][0]


def test_a_run_that_finished_leaves_a_page_and_says_so(train):
    result = train()
    assert result.exit_code == 0, result.output
    assert "look at the run: open runs/warm/report.html in a browser" in result.output
    assert page()["facts"]["status"] == "finished"
    assert page()["metrics"]["columns"]["loss"] == [1.5]


def test_a_run_that_failed_leaves_a_page_with_its_error(train):
    result = train(raising(ValueError("no luck")))
    assert result.exit_code == 1
    assert "report.html there shows the run" in result.output
    assert page()["facts"]["status"] == "failed"
    assert page()["facts"]["error"] == "no luck"
    assert "ValueError: no luck" in page()["error"]


def test_a_run_that_was_interrupted_leaves_a_page(train):
    result = train(lambda: (os.kill(os.getpid(), signal.SIGINT), time.sleep(30)))
    assert result.exit_code == 130
    assert page()["facts"]["status"] == "interrupted"


@pytest.mark.parametrize("strict", ["false", "true"])
def test_a_page_that_cannot_be_written_changes_nothing_of_the_end(train, monkeypatch: pytest.MonkeyPatch, strict: str):
    monkeypatch.setattr("enginehouse_report.page.write_report", lambda *_, **__: raising(OSError("the disk is full"))())
    result = train(lambda: None, f"plugins.strict={strict}")
    assert result.exit_code == 0, result.output
    assert "finished" in result.output
    assert "report.html" not in result.output
    assert not Path("runs/warm/report.html").exists()


PROGRAM = f"""
import sys, time
from enginehouse.cli.main import main
import enginehouse_report.page
{QUICK_TRAINER}
def hangs(*_, **__):
    print("writing", flush=True)
    time.sleep(10000)

enginehouse_report.page.write_report = hangs
main(["sft", "sft.yaml", "--json"])
"""


@pytest.mark.slow
def test_a_page_that_takes_long_is_ended_by_a_second_ctrl_c_and_nothing_is_lost(project: Project):  # noqa: F811
    project.save_sft()
    program = [sys.executable, "-c", PROGRAM]
    process = subprocess.Popen(program, cwd=project.root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while "writing" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    while "Interrupt again to end it at once" not in process.stderr.readline():
        assert process.poll() is None
    time.sleep(KEY_ECHO_SECONDS + 0.1)  # within it two are one wish
    process.send_signal(signal.SIGINT)
    events, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "metrics of 1 step" in said
    assert json.loads((project.root / "runs" / "warm" / "run.json").read_text())["status"] == "finished"
    assert json.loads(events.splitlines()[-1])["status"] == "finished"


def test_whoever_interrupted_a_run_waits_less(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    given = []
    monkeypatch.setattr("enginehouse_report.page.write_report", lambda runs, out, seconds: given.append((out, seconds)))
    for outcome in ("finished", "failed", "interrupted"):
        ours.enginehouse_run_recorded(str(tmp_path), outcome)
    assert [seconds for _, seconds in given] == [10.0, 10.0, 2.0]
    assert {out for out, _ in given} == {tmp_path / "report.html"}


def test_the_plugin_is_light_and_whole():
    (plugin,) = [one for one in plugins().plugins if one.name == "report"]
    assert plugin.status == "ok", plugin.problem
    assert plugin.note == ""
    assert "enginehouse_run_recorded" in plugin.hooks
