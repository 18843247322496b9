"""A vLLM replica's processes: none is left behind, whatever ends first, and a lost one is an error at once."""

from __future__ import annotations

import os
import shutil
import signal

import psutil
import pytest

from enginehouse.controller import RemoteError, WorkerDied
from enginehouse.errors import ModelError
from enginehouse.testing.models import tiny_model

pytestmark = pytest.mark.slow

SECONDS = 120  # longest a process may take to end


@pytest.fixture(scope="module")
def path():
    return tiny_model(hidden=128, max_positions=16384)


def beneath(pid: int) -> list[psutil.Process]:
    """All processes that were started from one and run, but for Python's own resource trackers, which end with it."""
    found = psutil.Process(pid).children(recursive=True)
    return [process for process in found if not any("resource_tracker" in word for word in process.cmdline())]


def test_shutdown_ends_what_runs_and_every_process(replica, path):
    with replica() as group:
        group.call("launch", path, {})
        started = beneath(group.call("pid")[0])
        assert [process.pid for process in started] == group.call("act", "processes")[0]
        result, left = group.call("act", "end")[0]
        assert result.completions[0].finish_reason == "abort"
        assert result.completions[0].token_ids
        assert left == []
        assert psutil.wait_procs(started, timeout=SECONDS)[1] == []
        with pytest.raises(RemoteError, match="not launched"):
            group.call("act", "generate", [[5]], {})


def test_a_lost_engine_core_is_an_error_of_every_call_at_once(replica, path):
    with replica() as group:
        group.call("launch", path, {})
        raised = group.call("act", "lose_engine_core")[0]
        assert {name for name, _ in raised} == {"VLLMFailed"}
        assert all("engine core has died" in said for _, said in raised)
        assert all("SIGKILL" in said for _, said in raised[1:])


def test_the_processes_of_a_killed_worker_end(replica, path):
    with replica() as group:
        group.call("launch", path, {"tensor_parallel": 2})
        pid = group.call("pid")[0]
        started = beneath(pid)
        assert len(started) == 3  # the engine core, and a worker for each part of the model
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerDied):
            group.call("act", "processes")
        assert psutil.wait_procs(started, timeout=SECONDS)[1] == []


def test_a_model_that_vllm_cannot_run_is_refused_at_launch(replica, path, tmp_path):
    with replica() as group:
        with pytest.raises(RemoteError, match="value") as refused:
            group.call("launch", path, {}, "value")
        assert isinstance(refused.value.cause, ModelError)
        with pytest.raises(RemoteError, match=r"no config\.json") as refused:
            group.call("launch", str(tmp_path), {})
        assert isinstance(refused.value.cause, ModelError)
        odd = shutil.copytree(tiny_model(), tmp_path / "odd")  # heads of 8, which vLLM's CPU attention does not take
        with pytest.raises(RemoteError, match=r"cannot generate with it .*: \w+Error: .*head_dim=8") as refused:
            group.call("launch", str(odd), {})
        assert isinstance(refused.value.cause, ModelError)
        assert beneath(group.call("pid")[0]) == []
