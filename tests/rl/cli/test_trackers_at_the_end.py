"""What trackers do at the end of a run, and of the program, as the command line has it."""

import contextlib
import json
import signal
import subprocess
import sys
import time

import pytest
from projects import QUICK_TRAINER, Project, project  # noqa: F401 - a fixture

PROGRAM = f"""
import sys
from enginehouse.cli.main import main
from enginehouse_rl.runs import tracking
{QUICK_TRAINER}
tracking.ENDING_SECONDS = float(sys.argv[1])
main(["sft", "sft.yaml", "run.trackers=[{{name: 'hanging:Hangs'}}]"])
"""
HANGS = """
import atexit, time

class Hangs:
    def start(self, run):
        atexit.register(time.sleep, 10000)
    def log(self, step, metrics, kind): ...
    def finish(self, outcome):
        time.sleep(10000)
"""
MANY = 60.0


@pytest.fixture
def begin(project: Project):  # noqa: F811 - it is the fixture
    project.save_sft()
    (project.root / "hanging.py").write_text(HANGS)
    started = []

    def begin(ending_seconds: float) -> subprocess.Popen:
        program = [sys.executable, "-c", PROGRAM, str(ending_seconds)]
        started.append(subprocess.Popen(program, cwd=project.root, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def status(project: Project) -> str:  # noqa: F811
    with contextlib.suppress(OSError, ValueError):
        return json.loads((project.root / "runs" / "warm" / "run.json").read_text())["status"]
    return ""


def test_a_tracker_that_hangs_for_good_is_left_and_the_program_ends_with_its_own_code(begin):
    process = begin(0.1)
    _, said = process.communicate(timeout=MANY)
    assert process.returncode == 0, said
    assert "the tracker 'hanging:Hangs' did not end in time, so the run ends without it" in said


@pytest.mark.slow
def test_a_run_that_is_forced_to_end_while_it_waits_for_a_tracker_is_still_a_finished_one(begin, project: Project):  # noqa: F811
    process = begin(10000.0)
    until = time.monotonic() + MANY
    while status(project) != "finished":
        assert process.poll() is None
        assert time.monotonic() < until
    while process.poll() is None:  # once asks, and once more forces it
        assert time.monotonic() < until
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.5)
    assert process.returncode == 130
    assert status(project) == "finished"
