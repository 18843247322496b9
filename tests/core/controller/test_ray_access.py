"""Nobody calls Ray once it is being shut down, and no call that ends something is waited for without a limit."""

import subprocess
import sys
import threading

import psutil
import pytest
import ray
from ray_programs import ClusterProgram

from enginehouse.controller import cluster
from enginehouse.controller.errors import ClusterLost
from enginehouse.controller.ray_access import RayAccess, ray_access


def test_a_call_that_does_not_end_is_given_up_and_no_other_is_tried():
    access, release, made = RayAccess(), threading.Event(), []
    assert access.end("be quick", lambda: made.append("quick"))
    assert not access.stuck
    assert not access.end("hang", release.wait, seconds=0.01)
    assert access.stuck
    assert not access.end("come after it", lambda: made.append("after it"))
    assert made == ["quick"]
    (hung,) = [thread for thread in threading.enumerate() if thread.name == "ray-hang"]
    release.set()
    hung.join()
    assert not access.stuck  # it was slow
    assert access.end("come after that", lambda: made.append("after that"))
    assert made == ["quick", "after that"]


def test_a_cluster_that_could_not_be_shut_down_is_abandoned_also_once_the_call_has_ended(monkeypatch):
    access, release = RayAccess(), threading.Event()
    monkeypatch.setattr(cluster, "ray_access", access)
    monkeypatch.setattr(cluster, "SHUTDOWN_SECONDS", 0.01)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "shutdown", release.wait)
    cluster.Cluster(owned=True).shutdown()
    assert (access.stuck, access.abandoned) == (True, True)
    release.set()
    (hung,) = [thread for thread in threading.enumerate() if thread.name == "ray-shut down"]
    hung.join()
    assert (access.stuck, access.abandoned) == (False, True)
    with pytest.raises(ClusterLost), access:
        pass


def _kill_control_service_and_look() -> str:
    """Inside a program that has joined a cluster: what it is told once that is headless."""
    (control,) = [child for child in psutil.Process().children() if child.name() == "gcs_server"]
    control.kill()
    psutil.wait_procs([control])
    try:
        ray_access.look()
    except ClusterLost as lost:
        return str(lost)
    return "nothing"


@pytest.mark.slow
@pytest.mark.fault(
    area="processes",
    what="the control service of a Ray cluster that the run joined dies, on the run's machine",
    happens="the run ends with an error that says so, before Ray kills it. On another machine Ray kills it",
    exit_code="1",
    kept="a checkpoint and the model of the last update",
    noticed="at the next call of a worker, within 1 s",
)
def test_the_control_service_of_a_cluster_that_was_joined_is_watched():
    program = ClusterProgram({"num_cpus": 1})
    try:
        assert program.run(_kill_control_service_and_look).startswith("Ray's control service (gcs_server, pid")
    finally:
        program.kill()


def test_an_error_of_such_a_call_is_the_callers():
    with pytest.raises(ZeroDivisionError):
        RayAccess().end("fail", lambda: 1 / 0)


def test_closing_waits_for_who_is_inside_and_lets_nobody_in():
    access = RayAccess()
    inside, refused = threading.Event(), threading.Event()

    def call() -> None:
        with access:
            inside.set()
            try:
                while True:
                    access.check()
            except ClusterLost:
                refused.set()

    threading.Thread(target=call, daemon=True).start()
    inside.wait()
    access.close()
    assert refused.is_set()
    with pytest.raises(ClusterLost, match="shut down"), access:
        pass
    access.look()  # by who needs no Ray
    access.open(None)
    with access:
        pass


def test_a_control_service_that_ended_is_noticed_until_the_caller_carries_on():
    access = RayAccess()
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    control = psutil.Process(process.pid)
    access.open(None)
    process.kill()
    process.wait()
    access.open(control)
    for _ in range(2):
        with pytest.raises(ClusterLost, match=f"pid {process.pid}"), access:
            pass
    with pytest.raises(ClusterLost):
        access.look()
    assert access.lost
    access.carry_on()
    with access:
        pass
