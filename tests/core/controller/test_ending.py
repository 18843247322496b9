"""Nothing is left over."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import CancelledError
from pathlib import Path

import controller_workers
import psutil
import pytest
from controller_workers import Leaver, Trouble

from enginehouse.controller import GroupClosed, WorkerDied
from enginehouse.controller.launchers.event_loop import EventLoop
from enginehouse.controller.launchers.role_objects import RoleObjects


@pytest.mark.slow
def test_workers_shut_down_in_order_and_their_children_end_with_them(launch, tmp_path):
    note = tmp_path / "note"
    group = launch(Leaver, str(note))
    children = group.execute_all("start_child")
    assert all(_alive(pid) for pid in [*group.pids, *children])
    group.shutdown()
    assert not any(_alive(pid) for pid in [*group.pids, *children])
    assert sorted(note.read_text().splitlines()) == ["rank 0 left", "rank 1 left"]


@pytest.mark.slow
def test_a_hanging_group_ends_as_well(launch):
    group = launch(Trouble, timeout=0.3)
    with pytest.raises(Exception, match="hang_on"):
        group.hang_on(1)
    group.shutdown()
    assert not any(_alive(pid) for pid in group.pids)
    with pytest.raises(GroupClosed):
        group.fine()


def test_a_call_that_comes_after_the_end_of_its_process_is_cancelled():
    objects = RoleObjects()
    objects.close(timeout=1.0)
    with pytest.raises(CancelledError, match="odd was shut down"):
        objects["odd"]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["hang_on", "hang_async"])
def test_a_call_that_still_ran_when_its_group_was_ended_says_so(launch, method):
    group = launch(Trouble, name="odd", processes=1)
    future = group.call(method, *([0] if method == "hang_on" else []), blocking=False)
    group.shutdown(timeout=1.0)
    with pytest.raises(WorkerDied, match=rf"^odd rank 0 .*'{method}' had not ended.*: odd was shut down$"):
        future.result()


@pytest.mark.parametrize("resists", [False, True])
def test_an_event_loop_that_is_stopped_leaves_no_task_that_is_heard_of_later(caplog, resists):
    begun = threading.Event()

    async def endless(depth: int) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:  # as a request that is lost begins another
            if depth:
                kept.append(asyncio.get_running_loop().create_task(endless(depth - 1)))
            if resists:
                await asyncio.Event().wait()

    kept: list[asyncio.Task[None]] = []
    loop = EventLoop()
    submitted = loop.submit(endless(1))  # held: else a collection of garbage may find the task before it is stopped
    begun.wait()
    loop.stop(0.2)
    kept.clear()
    del loop, submitted
    gc.collect()
    assert "Task was destroyed" not in caplog.text


PROGRAM = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs, and so their children, ignore it
sys.path.insert(0, {here!r})
from controller_workers import Trouble
from enginehouse.controller import ResourcePool, WorkerGroup, WorkerSpec, start_ray
import psutil
with start_ray(), WorkerGroup(ResourcePool([4]), WorkerSpec(Trouble).options(distributed=False), name="four") as group:
    print("pids", *[child.pid for child in psutil.Process().children(recursive=True)], flush=True)
    {body}
print("left", [child.name() for child in psutil.Process().children(recursive=True)], flush=True)
"""


def _start(body: str) -> tuple[subprocess.Popen, list[int]]:
    program = PROGRAM.format(here=str(Path(controller_workers.__file__).parent), body=body)
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline().split()
    assert line[:1] == ["pids"], process.communicate()
    return process, [int(pid) for pid in line[1:]]


@pytest.mark.slow
def test_a_cluster_started_here_ends_and_says_nothing():
    process, pids = _start("assert group.fine() == [0, 1, 2, 3]")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert out.splitlines() == ["left []"]
    assert err == ""
    assert not any(_alive(pid) for pid in pids)


@pytest.mark.slow
def test_ctrl_c_reaches_only_the_driver_and_everything_ends():
    process, pids = _start("import os; print('calling', flush=True); group.call('hang_on', 0, timeout=3600)")
    assert process.stdout is not None
    assert process.stdout.readline() == "calling\n"
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does
    _, err = process.communicate(timeout=60)
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert "WorkerDied" not in err
    assert not any(_alive(pid) for pid in pids)


@pytest.mark.fault(
    area="processes",
    what="the run's own process is killed outright (SIGKILL, or it crashes)",
    happens="all its processes end by themselves, including Ray's if the run started Ray",
    exit_code="137",
    kept=(
        "metrics up to the last step, models, and what `train.checkpoint_every` and `train.checkpoint_minutes` wrote"
    ),
    noticed="within 10 s",
)
@pytest.mark.slow
def test_nothing_outlives_a_driver_that_is_killed():
    process, pids = _start("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if _alive(pid)], timeout=30)  # of a busy machine
    assert not alive


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_cluster_that_is_not_there_is_said_soon():
    program = "from enginehouse.controller import start_ray; start_ray('127.0.0.1:1')"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert "ControllerError: could not join the Ray cluster at '127.0.0.1:1'" in ended.stderr
