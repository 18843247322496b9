"""A side of the dispatch benchmark: told over a pipe what to do, watched from outside, paused and ended."""

import os
import sys
import time
from pathlib import Path

import psutil
import pytest
from benchmarks import dispatch_side
from benchmarks.dispatch_side import SideProcess

ROOT = Path(__file__).parents[3]

PROGRAM = """
import mmap, os, subprocess, sys
from benchmarks.dispatch_side import serve

class Example:
    def double(self, number):
        print("doubling", number)
        return 2 * number

    def fail(self):
        raise ValueError("the reason")

    def leave(self):
        print("last words", flush=True)
        os._exit(3)

    def hang(self):
        sys.stdin.read()

    def start_child(self):
        self.child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        return self.child.pid

    def hold(self, megabytes, shared, until):
        size = int(megabytes * 1e6)
        held = mmap.mmap(-1, size, flags=mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE)
        for start in range(0, size, 4096):
            held[start] = 1
        while not os.path.exists(until):
            os.sched_yield()
        held.close()

    def close(self):
        print("closed", flush=True)

serve(Example())
"""


PATIENCE_SECONDS = 60.0


def comes_to(process: psutil.Process, status: str) -> bool:
    """Whether a process takes on a status before patience ends: a signal is delivered a moment after it is sent."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while process.status() != status and time.monotonic() < deadline:
        os.sched_yield()
    return process.status() == status


@pytest.fixture
def side(tmp_path):
    with SideProcess("example", [sys.executable, "-c", PROGRAM], tmp_path / "log", cwd=ROOT, env=os.environ) as started:
        yield started


def test_it_answers_and_what_it_prints_goes_to_the_log(side, tmp_path):
    assert [side.ask("double", number=number) for number in (2, 3)] == [4, 6]
    side.close()
    assert (tmp_path / "log").read_text().splitlines() == ["doubling 2", "doubling 3", "closed"]


def test_a_command_that_fails_shows_why_and_the_next_one_works(side):
    with pytest.raises(RuntimeError, match=r"example: fail: (.|\n)*the reason"):
        side.ask("fail")
    assert side.ask("double", number=1) == 2


def test_a_side_that_dies_is_reported_with_its_last_words(side):
    with pytest.raises(RuntimeError, match=r"example: leave: it ended(.|\n)*last words"):
        side.ask("leave")


def test_a_side_that_does_not_answer_in_time_is_given_up(side):
    with pytest.raises(RuntimeError, match=r"hang: no answer within 0\.1 s"):
        side.ask("hang", timeout=0.1)


@pytest.fixture
def seen(monkeypatch, tmp_path):
    """A path that exists once a look at a side's memory has found 80 MB more: what stays until then is not missed."""
    path = tmp_path / "seen"
    look = dispatch_side._Watch.look

    def noted(watch):
        look(watch)
        if watch._most[1] - watch._before[1] > 80e6:
            path.touch()

    monkeypatch.setattr(dispatch_side._Watch, "look", noted)
    return str(path)


def test_memory_of_its_own_is_seen_though_it_is_gone_when_the_answer_comes(side, seen):
    side.ask("double", number=1, watch=0.001)
    assert side.memory.own < 10e6
    side.ask("hold", megabytes=100, shared=False, until=seen, watch=0.001)
    assert side.memory.own > 80e6


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says what is shared")
def test_shared_memory_counts_as_resident_but_not_as_its_own(side, seen):
    side.ask("hold", megabytes=100, shared=True, until=seen, watch=0.001)
    assert side.memory.own < 10e6
    assert side.memory.resident > 80e6


@pytest.mark.slow
def test_a_paused_side_stands_still_with_its_children_and_goes_on_when_asked(side):
    child = psutil.Process(side.ask("start_child"))
    side.pause()
    assert comes_to(child, psutil.STATUS_STOPPED)
    assert side.ask("double", number=4) == 8
    assert comes_to(child, psutil.STATUS_SLEEPING)


@pytest.mark.slow
def test_ending_a_paused_side_ends_its_children(side):
    child = psutil.Process(side.ask("start_child"))
    side.pause()
    side.close()
    assert not child.is_running()
