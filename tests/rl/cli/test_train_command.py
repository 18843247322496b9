"""`enginehouse train`: how a run ends and what it says then.

The trainer here is a stand-in that fails, hangs or is interrupted on purpose; real training is in tests/integration.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner
from projects import Project

from enginehouse.cli import interrupts
from enginehouse.cli.main import main
from enginehouse.controller.ray_access import RayAccess
from enginehouse_rl.cli.train import train
from enginehouse_rl.runs import RunDirectory
from enginehouse_testing.models import tiny_model

STAND_IN = """
import subprocess, sys, time, types
from enginehouse.cli.main import main
from enginehouse.controller.errors import RemoteError, WorkerDied
from enginehouse.errors import DataError

class Trainer:
    def __init__(self, plan, run, progress):
        self.run_directory, self.progress = run, progress

    def run(self):
        self.progress.start(10)
        for step in (1, 2):
            with self.run_directory.clock.step(step), self.run_directory.clock.phase("generate"):
                metrics = {"reward/mean": step / 10, "loss": 1.0}
            self.run_directory.log(step, metrics)
            self.progress.step_finished(step, metrics)
        BEHAVIOUR

sys.modules["enginehouse_rl.loop.trainer"] = module = types.ModuleType("enginehouse_rl.loop.trainer")
module.Trainer = Trainer
main(["train", "grpo.yaml", "run.grace_seconds=1", *sys.argv[1:]], prog_name="enginehouse")
"""

WITHIN_SECONDS = 120
"""A limit for a test that would otherwise hang; how long an ending takes is not what it measures."""
# Naps, not one sleep: a signal that comes just before a sleep begins is dealt with only after it.
ORDERLY = "print('READY', flush=True)\n        while True: time.sleep(0.1)"
STUBBORN = """
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
        ready = False
        while True:
            try:
                if not ready:
                    ready = True
                    print("READY", child.pid, flush=True)
                time.sleep(0.1)
            except KeyboardInterrupt:
                pass
"""
IN_NATIVE_CODE = """
        import hashlib
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
        while True:
            try:
                print("READY", child.pid, flush=True)
                hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
            except KeyboardInterrupt:  # it came just before
                pass
"""
"""No handler of Python's runs then."""
HOLDING_A_LOCK = "with self.run_directory.timeline._lock:" + textwrap.indent(STUBBORN, "    ")
"""What the last words need is held by the thread that does not end."""


@pytest.fixture
def project(tmp_path: Path) -> Project:
    project = Project(tmp_path)
    project.save()
    return project


def start(
    project: Project,
    behaviour: str,
    *arguments: str,
    script: str = STAND_IN,
    stdout: Any = subprocess.PIPE,
    plugins: str = "torch",
) -> subprocess.Popen[str]:
    """A run whose terminal can be closed, also where these tests are run by nohup."""
    return subprocess.Popen(
        [sys.executable, "-c", script.replace("BEHAVIOUR", behaviour), *arguments],
        cwd=project.root,
        env={**os.environ, "ENGINEHOUSE_PLUGINS": plugins},
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )


def until_ready(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("READY"):
            return line.split()[1:]
    raise AssertionError(process.communicate()[1])


def record(project: Project) -> dict:
    return json.loads((project.root / "runs/one/run.json").read_text())


def spans(project: Project) -> list[str]:
    return [e["name"] for e in json.loads((project.root / "runs/one/timeline.json").read_text()) if e["ph"] == "X"]


def test_a_run_that_finishes_says_what_it_reached(project: Project):
    out, err = start(project, "pass").communicate()
    assert "outcome: finished after 2 of 10 steps" in out, err
    assert "next: " in out
    assert record(project)["status"] == "finished"
    assert (project.root / "runs/one/config.yaml").exists()
    assert len((project.root / "runs/one/metrics.jsonl").read_text().splitlines()) == 2
    assert spans(project) == ["generate", "step 1", "generate", "step 2"]


def test_a_secret_that_a_config_names_is_in_nothing_that_a_run_says_or_writes(project: Project, monkeypatch):
    (project.root / "judge.py").write_text("def score(response, api_key, **columns): return 0.0\n")
    monkeypatch.setenv("JUDGE_KEY", "sk-7d1f5c")
    named = ("reward.function=judge:score", "reward.arguments.api_key='${JUDGE_KEY}'")
    said = "".join(start(project, "pass", *named).communicate())
    assert "outcome: finished" in said
    written = [file.read_bytes() for file in (project.root / "runs/one").rglob("*") if file.is_file()]
    assert any(b"${JUDGE_KEY}" in content for content in written)
    assert not any(b"sk-7d1f5c" in content for content in [said.encode(), *written])


def events(out: str) -> list[dict]:
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["event"] for row in rows[:2]] == ["plan", "start"]
    assert [(row["event"], row["step"], row["metrics"]["loss"]) for row in rows[2:4]] == [
        ("step", 1, 1),
        ("step", 2, 1),
    ]
    return rows


NOISY = "print('a library says so'); import os; os.write(1, b'so does a worker'); self.progress.note('n')"


@pytest.mark.parametrize(
    ("behaviour", "code", "end"),
    [
        (NOISY, 0, {"status": "finished", "error": None}),
        ("print('so'); raise RuntimeError('no luck')", 1, {"status": "failed", "error": "no luck"}),
        ("import os, signal; os.kill(os.getpid(), signal.SIGINT); time.sleep(9)", 130, {"status": "interrupted"}),
    ],
)
def test_json_is_events_alone_however_the_run_ends(project: Project, behaviour: str, code: int, end: dict):
    (project.root / "loud.py").write_text("print('so does a reward')\ndef score(response, **columns): return 0.0\n")
    process = start(project, behaviour, "reward.function=loud:score", "--json")
    out, err = process.communicate()
    assert process.returncode == code, err
    *before, last = events(out)
    assert last["event"] == "end"
    assert last["status"] == record(project)["status"]
    assert last | end == last
    assert (last["steps"], last["directory"], last["model"]) == (2, str(project.root / "runs/one"), None)
    if behaviour == NOISY:
        assert before[-1] == {"event": "note", "text": "n"}
        assert "a library says so" in err
        assert "so does a worker" in err
        assert "so does a reward" in err


def test_a_reader_of_json_that_goes_away_does_not_end_the_run(project: Project):
    process = start(project, "print('so')", "--json")
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(WITHIN_SECONDS) == 0
    assert record(project)["status"] == "finished"


@pytest.mark.parametrize("mode", [(), ("--quiet",)])
def test_an_output_that_takes_nothing_from_the_first_line_on_does_not_end_the_run(project: Project, mode: tuple):
    with open("/dev/full", "w") as full:
        process = start(project, "pass", *mode, stdout=full)
    _, err = process.communicate(timeout=WITHIN_SECONDS)
    assert process.returncode == 0, err
    assert record(project)["status"] == "finished"
    assert err.count("the run continues without it") == 1
    assert "Traceback" not in err


def test_a_config_that_is_refused_has_no_event(project: Project):
    process = start(project, "pass", "--json", "train.stepz=3")
    out, err = process.communicate()
    assert (process.returncode, out) == (2, "")
    assert "train.stepz" in err


def test_quiet_and_json_exclude_each_other(project: Project):
    result = CliRunner().invoke(train, ["grpo.yaml", "--quiet", "--json"])
    assert result.exit_code == 2
    assert "leave out one of them" in result.output


def test_quiet_says_only_how_it_ended(project: Project):
    out, _ = start(project, "pass", "--quiet").communicate()
    assert out == f"finished: {project.root / 'runs/one'}\n"


@pytest.mark.parametrize(
    ("behaviour", "code", "said"),
    [
        (
            'raise WorkerDied("actor rank 1 on 10.0.0.1 (pid 7) died in update")',
            1,
            "actor rank 1 on 10.0.0.1 (pid 7) died",
        ),
        ('raise RuntimeError("a bug")', 1, "a bug"),
        ("raise KeyboardInterrupt", 1, "the run was ended by KeyboardInterrupt"),  # of a reward's, not of the user
        ('raise DataError("row 3 is longer than data.max_prompt_tokens")', 2, "row 3 is longer"),
        (
            'error = RemoteError("actor rank 0: DataError"); error.cause = DataError("row 9 is too long"); raise error',
            2,
            "row 9 is too long",
        ),
    ],
)
def test_a_run_that_fails_keeps_its_metrics_and_says_why(project: Project, behaviour: str, code: int, said: str):
    process = start(project, behaviour)
    _, err = process.communicate()
    assert process.returncode == code, err
    assert said in err
    assert "The run failed. Saved: metrics of 2 steps, no model. It is all in runs/one" in err
    assert record(project)["status"] == "failed"
    assert "Traceback" in (project.root / "runs/one/error.txt").read_text()
    assert len((project.root / "runs/one/metrics.jsonl").read_text().splitlines()) == 2


FAILING_WORKER = """
        from enginehouse.controller import WorkerGroup, WorkerSpec
        class Actor:
            def train_step(self):
                {}["advantages"]
        spec = WorkerSpec(Actor).options(distributed=False)
        with WorkerGroup(None, spec, name="actor", launcher="inline") as group:
            group.execute_all("train_step")
"""


def test_what_a_worker_of_an_inline_run_raises_is_one_message_that_names_role_and_method(project: Project):
    process = start(project, FAILING_WORKER)
    _, err = process.communicate()
    assert process.returncode == 1, err
    assert "\nError: actor rank 0 (node " in err
    assert "'train_step' raised KeyError: 'advantages'" in err
    assert "Traceback" not in err
    assert ", in train_step" in (project.root / "runs/one/error.txt").read_text()


@pytest.mark.parametrize(
    "behaviour",
    [
        "raise OSError(5, 'Input/output error')",
        "raise OSError(27, 'File too large')",
        "(self.run_directory.path / 'gone/file').open('w')",
    ],
    ids=["failing", "limited", "gone"],
)
def test_a_disk_that_fails_is_one_message_that_names_the_path(project: Project, behaviour: str):
    process = start(project, behaviour)
    _, err = process.communicate()
    assert process.returncode == 1, err
    assert f"Error: the run cannot write to the disk of {project.root / 'runs/one'}: " in err
    assert "Traceback" not in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_run_ends_in_order_and_says_what_was_saved(project: Project, number: signal.Signals):
    process = start(project, ORDERLY)
    until_ready(process)
    for _ in range(2):  # as `timeout` does, which signals its child and then the child's group
        process.send_signal(number)
    _, err = process.communicate(timeout=WITHIN_SECONDS)
    assert process.returncode == 128 + number
    assert "Saved: metrics of 2 steps, no model" in err
    assert "Traceback" not in err
    assert record(project)["status"] == "interrupted"
    assert spans(project)[-1] == "step 2"


@pytest.mark.parametrize(
    ("number", "seconds", "forced"),
    [(signal.SIGINT, 0.1, False), (signal.SIGINT, 0.5, True), (signal.SIGTERM, 0.5, False), (signal.SIGTERM, 2, True)],
)
def test_a_signal_that_comes_twice_at_once_is_one_wish(monkeypatch, number, seconds, forced):
    ended = 0
    now, heard, ends = [0.0], [number, number, ended], []

    def following(limit: float | None) -> int:
        now[0] = 0.0 if len(heard) == 3 else seconds
        return heard.pop(0)

    monkeypatch.setattr(interrupts, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(interrupts, "_write_notice", lambda: None)
    watching = interrupts.Interrupts(lambda: None)
    monkeypatch.setattr(watching, "_next", following)
    monkeypatch.setattr(watching, "_force", lambda: ends.append("forced"))
    watching._watch()
    assert ends == ["forced"] * forced


@pytest.mark.parametrize(("number", "forced"), [(signal.SIGINT, False), (signal.SIGTERM, True)])
def test_an_ending_has_a_deadline_unless_ctrl_c_began_it(monkeypatch, number, forced):
    ended, limits, ends = 0, list[float | None](), []

    def following(limit: float | None) -> int | None:
        limits.append(limit)
        return number if len(limits) == 1 else ended if limit is None else None

    monkeypatch.setattr(interrupts, "_write_notice", lambda: None)
    watching = interrupts.Interrupts(lambda: None, grace_seconds=25.0)
    monkeypatch.setattr(watching, "_next", following)
    monkeypatch.setattr(watching, "_force", lambda: ends.append("forced"))
    watching._watch()
    assert ends == ["forced"] * forced
    assert limits == [None, pytest.approx(25.0, abs=1.0) if forced else None]


@pytest.mark.fault(
    area="signals",
    what="a second Ctrl-C, or a signal whose run.grace_seconds are over, while the run ends",
    happens="the final summary is printed, `report.html` is written, and all its processes are killed",
    exit_code="128 + the first signal: 130, 143",
    kept="what was saved by then",
    noticed="at once",
)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("signals", "behaviour"),
    [(1, STUBBORN), (2, STUBBORN), (1, HOLDING_A_LOCK), (2, HOLDING_A_LOCK), (2, IN_NATIVE_CODE)],
    ids=["1-stubborn", "2-stubborn", "1-holding-a-lock", "2-holding-a-lock", "2-in-native-code"],
)
def test_a_run_that_does_not_end_is_ended_with_its_children(project: Project, signals: int, behaviour: str):
    number = signal.SIGINT if signals == 2 else signal.SIGTERM
    limits = ["run.grace_seconds=3600"] if signals == 2 else []
    process = start(project, behaviour, *limits, plugins="torch,report")
    (child,) = until_ready(process)
    process.send_signal(number)
    if signals == 2:
        assert process.stderr is not None
        while "Interrupted" not in process.stderr.readline():
            pass
        heard = threading.Event()

        def press() -> None:  # one that comes at once is an echo of the first
            while not heard.wait(0.05):
                process.send_signal(signal.SIGINT)

        threading.Thread(target=press).start()
        said = next(line for line in process.stderr if "Saved: " in line)
        heard.set()
    else:
        said = ""
    _, err = process.communicate(timeout=WITHIN_SECONDS)
    assert process.returncode == 128 + number
    assert "Saved: metrics of 2 steps" in said + err
    assert "interrupted" in (project.root / "runs/one/report.html").read_text()
    assert record(project)["status"] == "interrupted"
    assert not Path(f"/proc/{child}/cmdline").exists() or not Path(f"/proc/{child}/cmdline").read_text()


@pytest.mark.parametrize(("behaviour", "code", "status"), [("return", 0, "finished"), ("1 / 0", 1, "failed")])
def test_a_signal_while_the_end_is_recorded_changes_nothing(project: Project, behaviour: str, code: int, status: str):
    signalled = """
        import os, signal
        finish = self.run_directory.finish
        def interrupted(*arguments, **named):
            os.kill(os.getpid(), signal.SIGTERM)
            finish(*arguments, **named)
        self.run_directory.finish = interrupted
        """
    process = start(project, signalled.strip() + "\n        " + behaviour)
    _, err = process.communicate(timeout=WITHIN_SECONDS)
    assert process.returncode == code, err
    assert record(project)["status"] == status
    assert (project.root / "runs/one/error.txt").exists() is (status == "failed")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_a_program_that_has_nothing_left_to_end_changes_nothing(project: Project, number: signal.Signals):
    late = f"import atexit, os; atexit.register(os.kill, os.getpid(), {int(number)})"  # as Ray's end, it comes later
    process = start(project, "pass", script=f"{late}\n{STAND_IN}")
    out, err = process.communicate(timeout=WITHIN_SECONDS)
    assert process.returncode == 0, err
    assert "finished after 2 of 10 steps" in out
    assert record(project)["status"] == "finished"


def test_a_closed_terminal_does_not_stop_the_end(project: Project):
    process = start(project, ORDERLY)
    until_ready(process)
    for stream in (process.stdout, process.stderr):
        assert stream is not None
        stream.close()
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=WITHIN_SECONDS) == 128 + signal.SIGHUP
    assert record(project)["status"] == "interrupted"


def test_an_earlier_run_is_not_touched_unless_asked(project: Project):
    start(project, "pass").communicate()
    before = record(project)
    process = start(project, "pass")
    _, err = process.communicate()
    assert process.returncode == 2
    assert "already contains a run" in err
    assert record(project) == before
    process = start(project, "pass", "run.overwrite=true")
    process.communicate()
    assert process.returncode == 0
    assert record(project) != before


@pytest.mark.fault(
    area="files",
    what="a run is started in the directory of one that is still running, with `run.overwrite=true` or `--resume`",
    happens="the second run and its `plan` are rejected, naming process and host of the first, which continues",
    exit_code="2",
    kept="everything of the first",
    noticed="before anything is written",
)
def test_a_live_runs_directory_is_nobody_elses(project: Project):
    first = start(project, ORDERLY)
    until_ready(first)
    before = record(project)
    named = f"is still running (process {first.pid} on {socket.gethostname()}, since "
    for arguments in (["run.overwrite=true"], ["--resume"]):
        second = start(project, "pass", *arguments)
        assert named in second.communicate(timeout=WITHIN_SECONDS)[1]
        assert second.returncode == 2
    command = [sys.executable, "-m", "enginehouse.cli.main", "plan", "grpo.yaml", "run.overwrite=true"]
    planned = subprocess.run(command, cwd=project.root, capture_output=True, text=True)
    assert named in planned.stderr
    assert record(project) == before
    assert len((project.root / "runs/one/metrics.jsonl").read_text().splitlines()) == 2
    first.kill()
    first.communicate()
    third = start(project, "pass", "run.overwrite=true")
    _, err = third.communicate(timeout=WITHIN_SECONDS)
    assert third.returncode == 0, err


@pytest.mark.parametrize(
    ("command", "data", "row", "said"),
    [
        ("train", "train.jsonl", {"prompt": "1+" * 40, "answer": "0"}, "max_prompt_tokens"),
        ("sft", "demonstrations.jsonl", {"prompt": "1+" * 40, "response": "0"}, "max_tokens"),
    ],
)
@pytest.mark.parametrize("earlier", [True, False])
def test_bad_data_costs_no_earlier_run(project, monkeypatch, command, data, row, said, earlier):
    """With the real trainers: only they read every row."""
    monkeypatch.chdir(project.root)
    monkeypatch.setattr(sys, "path", list(sys.path))
    project.save_sft("sft.yaml")
    directory = project.root / "runs/one"
    if earlier:
        RunDirectory.create(directory, "").log(1, {"loss": 1.0})
    with (project.root / data).open("a") as file:
        file.write(json.dumps(row) + "\n")
    config = {"train": "grpo.yaml", "sft": "sft.yaml"}[command]
    overrides = [f"model.path={tiny_model()}", "run.directory=runs/one", "run.overwrite=true"]
    done = CliRunner().invoke(main, [command, config, *overrides])
    assert done.exit_code == 2, done.output
    assert said in done.stderr
    if earlier:
        assert len((directory / "metrics.jsonl").read_text().splitlines()) == 1
    else:
        assert not directory.exists()


def test_a_run_interrupted_while_it_reads_its_data_leaves_the_earlier_one(project: Project):
    start(project, "pass").communicate()
    before = record(project)
    script = STAND_IN.replace(
        "self.run_directory, self.progress = run, progress",
        "print('READY', flush=True)\n        while True: time.sleep(0.1)",
    )
    process = start(project, "pass", "run.overwrite=true", script=script)
    until_ready(process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=WITHIN_SECONDS)
    assert process.returncode == 130
    assert "Nothing was written; runs/one is unchanged" in err
    assert "Traceback" not in err
    assert record(project) == before


@pytest.mark.parametrize(("arguments", "code"), [(["plan", "--help"], 0), (["parity", "not there"], 2)])
def test_no_command_ends_through_a_ray_that_is_stuck(monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int):
    release, leaving, left = threading.Event(), [], []
    access = RayAccess()
    if code:
        access.abandoned = True
    else:
        access.end("hang", release.wait, seconds=0.01)
    monkeypatch.setattr("enginehouse.controller.ray_access.ray_access", access)
    monkeypatch.setattr("atexit.register", leaving.append)
    monkeypatch.setattr("os._exit", left.append)
    assert CliRunner().invoke(main, arguments).exit_code == code
    release.set()
    for leave in leaving:
        leave()
    assert left == [code]


def test_help_shows_examples():
    said = CliRunner().invoke(train, ["--help"]).output
    assert "enginehouse train grpo.yaml train.steps=50 rollout.engine.backend=vllm" in said


def test_a_config_argument_is_required():
    assert CliRunner().invoke(main, ["train"]).exit_code == 2


def test_a_command_that_is_mistyped_is_told_the_nearest():
    refused = CliRunner().invoke(main, ["trian", "grpo.yaml"])
    assert refused.exit_code == 2
    assert "unknown command 'trian'. Did you mean 'train'? Available: " in refused.output
    assert "certify" in refused.output  # a plugin's
    completing = click.Context(main, resilient_parsing=True)
    assert main.resolve_command(completing, ["trian"])[1] is None
