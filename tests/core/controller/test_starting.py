"""Ray that is late to start on a busy machine is started again; a fault is put in for that, the rest is Ray's own."""

import os
import subprocess
import sys
import traceback
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from enginehouse.controller import ControllerError, cluster
from enginehouse.controller.launchers.diagnosis import Diagnosis, describe_death
from enginehouse.controller.launchers.interface import WorkerPlace

PROGRAM = """
import os
import sys
import psutil
import ray
from enginehouse.controller import start_ray

real, late = ray.init, int(sys.argv[1])

def init(*arguments, **named):
    global late
    if late:
        late -= 1
        raise Exception("The current node timed out during startup. This could happen because ...")
    return real(*arguments, **named)

ray.init = init
with start_ray(num_cpus=1):
    print("started", ray.is_initialized())
    print("niceness", ray.get(ray.remote(lambda: os.nice(0)).remote()) - os.nice(0))
    family = psutil.Process().children(recursive=True)
    print("ports", sorted({one.laddr.port for each in family for one in each.net_connections("tcp")}))
"""


HEAD = """
import ray
from enginehouse.controller import start_ray

with start_ray(num_cpus=1):
    print(ray.get_runtime_context().gcs_address, flush=True)
    input()
"""


def started(late: int) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", PROGRAM, str(late)]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


FRAMES = "".join(
    f'  File "/long/path/of/somebody/site-packages/module_{number}.py", line 7, in call\n    return do(it)\n'
    for number in range(30)
)
DIED = (
    "The actor died because of an error raised in its creation task, ray::Host.__init__() (pid=1, ip=127.0.0.1)\n"
    f"Traceback (most recent call last):\n{FRAMES}ImportError: pyarrow requires NumPy 2.0 or newer, found 1.26.4\n"
)


def test_a_death_is_said_with_the_exception_at_the_end_of_a_long_text():
    said = describe_death(DIED)
    assert said.startswith("of an error raised in its creation task, ray::Host.__init__()")
    assert said.endswith("... ImportError: pyarrow requires NumPy 2.0 or newer, found 1.26.4")
    assert len(said) <= 610
    assert describe_death("The actor died because it was killed. Some common causes are many.") == "it was killed."


def test_the_whole_of_a_long_text_is_behind_the_error(monkeypatch: pytest.MonkeyPatch):
    place = WorkerPlace(0, 0, 1, "here", 1)
    ended = {"role": "odd", "method": "facts", "timeout": 1.0, "places": [place], "actors": [], "local": {}}
    diagnosis = Diagnosis(refs={0: None}, **ended)
    monkeypatch.setattr(diagnosis, "_outcomes", lambda: ({}, {0: DIED}))
    monkeypatch.setattr(diagnosis, "_deaths", lambda ranks: {})
    error = diagnosis.failed(RuntimeError())
    assert DIED in "".join(traceback.format_exception(error))
    monkeypatch.setattr(diagnosis, "_outcomes", lambda: ({}, {0: "the process is gone"}))
    assert diagnosis.failed(RuntimeError()).__cause__ is None


@pytest.mark.slow
def test_ray_that_is_late_is_started_again():
    ran = started(1)
    assert ran.returncode == 0, ran.stderr
    assert "started True" in ran.stdout
    assert "niceness 0\n" in ran.stdout, "workers have as much of a busy machine as any program"
    assert "ports [" in ran.stdout
    assert " 44217" not in ran.stdout, "nobody without the token is told Ray's figures"


def test_ray_that_does_not_come_up_is_a_clear_error():
    ran = started(3)
    assert ran.returncode != 0
    assert "could not start Ray on this machine: The current node timed out" in ran.stderr


@pytest.mark.parametrize(("says", "starts"), [(cluster.LATE, cluster.STARTS), ("no such option", 1)])
def test_a_start_that_fails_leaves_nothing_behind(tmp_path, monkeypatch, says, starts):
    calls: list[str] = []

    def init(**named: object) -> None:
        calls.append("init")
        raise RuntimeError(says)

    (tmp_path / "ray").mkdir()
    monkeypatch.setattr(cluster, "_short_temp_dir", lambda: str(tmp_path / "ray"))
    monkeypatch.setattr(cluster, "end_processes", lambda processes, patience: calls.append("end"))
    ray = SimpleNamespace(init=init, shutdown=lambda: calls.append("shutdown"))
    with pytest.raises(RuntimeError, match=says):
        cluster._start(ray, 1, {})
    assert calls == ["init", "shutdown", "end"] * starts
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("memory", "available", "shared", "expected"),
    [
        (128 << 30, 100 << 30, 64 << 30, int(0.3 * (128 << 30))),
        (128 << 30, 4 << 30, 64 << 30, 2 << 30),
        (128 << 30, 100 << 30, 8 << 30, int(0.8 * (8 << 30))),
        (128 << 30, 100 << 30, 64 << 20, cluster.LEAST_OBJECT_STORE_BYTES),
    ],
)
def test_the_object_store_is_a_part_of_the_machines_memory_and_of_what_is_free_to_be_shared(
    monkeypatch, memory, available, shared, expected
):
    monkeypatch.setattr(cluster.psutil, "virtual_memory", lambda: SimpleNamespace(total=memory, available=available))
    monkeypatch.setattr(cluster.shutil, "disk_usage", lambda path: SimpleNamespace(free=shared))
    asked: list[object] = []

    def init(**named: object) -> None:
        asked.append(named["object_store_memory"])
        raise RuntimeError("no such option")

    with pytest.raises(RuntimeError):
        cluster._start(SimpleNamespace(init=init, shutdown=lambda: None), 1, {})
    assert asked == [expected]


def failed_start(monkeypatch: pytest.MonkeyPatch, says: str) -> str:
    def fail(*arguments: object, **named: object) -> None:
        raise ValueError(says)

    ray = ModuleType("ray")
    ray.is_initialized = lambda: False  # type: ignore[attr-defined]
    ray.init, ray.shutdown = fail, lambda: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr("enginehouse.controller.ray_notices.quiet_notices", lambda: None)
    with pytest.raises(ControllerError) as caught:
        cluster.start_ray()
    return str(caught.value)


def test_an_address_left_over_in_the_environment_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    said = failed_start(monkeypatch, "")
    assert "at '127.0.0.1:1', which the environment variable RAY_ADDRESS names (unset it to start Ray here):" in said


def test_too_little_memory_is_said_with_what_can_be_done(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    said = failed_start(monkeypatch, "the amount of memory on this node available for tasks and actors (-5.08 GB) is")
    assert said.startswith("could not start Ray on this machine: other programs leave ")
    assert "cluster.launcher=inline" in said
    assert "ray.init" not in said


@pytest.mark.parametrize(
    "says", ["Failed to connect to Ray cluster at 127.0.0.1:6379", "ray client connection timeout"]
)
@pytest.mark.parametrize(
    ("mode", "said"),
    [
        (None, "process sends no token: export RAY_AUTH_MODE=token, with the cluster's token in ~/.ray/auth_token"),
        ("disabled", "this process sends no token: export RAY_AUTH_MODE=token, with the cluster's"),
        ("token", "this process sends a different token: copy the cluster's ~/.ray/auth_token"),
    ],
)
def test_a_cluster_that_takes_nobody_in_is_said_to_ask_for_a_token(monkeypatch, says, mode, said):
    """Ray says why in lines of its C++ alone, and not at all to its client (`ray://`)."""
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    if mode:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)

    def init(**named: object) -> None:
        raise ConnectionError(says)

    with pytest.raises(ConnectionError) as caught:
        cluster._join(SimpleNamespace(init=init), "auto", {})
    assert str(caught.value).startswith(says)
    assert "requires a token (InvalidAuthToken)" in str(caught.value)
    assert said in str(caught.value)


def test_where_no_cluster_runs_nothing_is_said_of_tokens():
    def init(**named: object) -> None:
        raise ConnectionError("Could not find any running Ray instance.")

    with pytest.raises(ConnectionError, match=r"^Could not find any running Ray instance\.$"):
        cluster._join(SimpleNamespace(init=init), "auto", {})


@pytest.mark.slow
def test_a_shell_without_the_clusters_token_is_told_what_to_set(tmp_path: Path):
    variables = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    head = subprocess.Popen(
        [sys.executable, "-c", HEAD],
        env=variables | {"HOME": str(tmp_path), "RAY_AUTH_MODE": "token"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert head.stdout is not None
        address = head.stdout.readline().strip()
        program = f"from enginehouse.controller import start_ray; start_ray({address!r})"
        joined = subprocess.run(
            [sys.executable, "-c", program], env=variables, capture_output=True, text=True, timeout=280, check=False
        )
    finally:
        head.communicate("\n", timeout=60)
    assert "requires a token (InvalidAuthToken), but this process sends no token" in joined.stderr.splitlines()[-1]
