"""A run directory belongs to one process at a time, and to none that has ended."""

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from enginehouse.errors import ConfigError
from enginehouse_rl.checkpoints import Checkpoint, find_newest_checkpoint
from enginehouse_rl.config import run_lock
from enginehouse_rl.config.earlier_run import read_record
from enginehouse_rl.runs import RunDirectory

HOLD = """
import os, subprocess, sys, time
from pathlib import Path
from enginehouse_rl.config import run_lock

run_lock.take(Path(sys.argv[1]))
nap = "import time; time.sleep(3600)"
children = []
if len(sys.argv) > 2:
    children = [os.fork()]
    if children == [0]:
        exec(nap)
    children += [subprocess.Popen([sys.executable, "-c", nap], close_fds=False).pid]
print(*children, flush=True)
time.sleep(3600)
"""


@contextmanager
def other_process(directory: Path, *children: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """One that holds a directory; with the children it started, a forked one and a program, if there is an argument."""
    directory.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-c", HOLD, str(directory), *children]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        started: list[int] = []
        try:
            assert process.stdout is not None
            started = [int(pid) for pid in process.stdout.readline().split()]
            yield process, started
        finally:
            process.kill()
            for child in started:
                os.kill(child, signal.SIGKILL)


@pytest.mark.slow
def test_a_directory_another_process_runs_in_is_refused_and_the_process_named(tmp_path: Path):
    with other_process(tmp_path) as (process, _):
        named = rf"is still running \(process {process.pid} on {socket.gethostname()}, since 20"
        with pytest.raises(ConfigError, match=named):
            run_lock.check_free(tmp_path)
        with pytest.raises(ConfigError, match=named):
            run_lock.take(tmp_path)
    run_lock.take(tmp_path)  # it was killed
    run_lock.release(tmp_path)


def test_what_a_killed_run_started_does_not_keep_its_directory(tmp_path: Path):
    with other_process(tmp_path, "children") as (process, children):
        assert len(children) == 2
        process.kill()
        process.wait()
        for child in children:
            os.kill(child, 0)  # alive
        run_lock.check_free(tmp_path)
        run_lock.take(tmp_path)
        run_lock.release(tmp_path)


def test_a_process_may_take_what_it_has_and_give_it_back(tmp_path: Path):
    run_lock.take(tmp_path)
    run_lock.take(tmp_path)
    assert run_lock.find_holder(tmp_path) is None
    look = f"""from pathlib import Path; from enginehouse_rl.config.run_lock import find_holder
print(find_holder(Path({str(tmp_path)!r})))"""
    seen = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert f"process {os.getpid()} on" in seen.stdout
    run_lock.release(tmp_path)
    seen = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert seen.stdout == "None\n"
    run_lock.release(tmp_path)


def test_without_locks_the_process_of_the_record_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = RunDirectory.create(tmp_path / "one", "")
    run.record.update(pid=os.getppid())

    def none(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    run_lock.release(run.path)
    with pytest.raises(ConfigError, match=f"still running \\(process {os.getppid()} on"):
        run_lock.take(run.path)
    with pytest.raises(ConfigError, match=f"still running \\(process {os.getppid()} on"):
        RunDirectory.create(run.path, "", overwrite=True)
    assert (run.path / "metrics.jsonl").exists()
    run.record.update(pid=2**22 + 1)  # gone
    RunDirectory.create(run.path, "", overwrite=True)


def test_a_run_that_began_in_a_fresh_directory_a_moment_ago_is_left_alone(tmp_path: Path):
    """It has the lock, and has written nothing yet."""
    with other_process(tmp_path / "one"):
        for overwrite in (False, True):
            with pytest.raises(ConfigError, match="still running"):
                RunDirectory.create(tmp_path / "one", "", overwrite=overwrite)
        assert [entry.name for entry in (tmp_path / "one").iterdir()] == ["run.lock"]
    RunDirectory.create(tmp_path / "one", "").finish("finished")


def test_a_resume_that_was_planned_before_another_one_ran_is_refused(tmp_path: Path):
    first = RunDirectory.create(tmp_path / "one", "")
    staged = first.checkpoints.stage(3)
    (staged / "actor").mkdir()
    first.checkpoints.publish(staged, Checkpoint(staged, 3, 1.0, {}, {}, "train", roles=("actor",)))
    first.finish("interrupted")
    checkpoint, _ = find_newest_checkpoint(first.path)
    assert checkpoint is not None
    checkpoint = replace(checkpoint, record=read_record(first.path))
    slow = RunDirectory(first.path, "", resumed=checkpoint)
    quick = RunDirectory.create(first.path, "", resumed=checkpoint)
    quick.log(4, {"loss": 1.0})
    quick.finish("interrupted")
    with pytest.raises(ConfigError, match="another process has resumed the run"):
        slow.open()
    assert '"step": 4' in (first.path / "metrics.jsonl").read_text()
