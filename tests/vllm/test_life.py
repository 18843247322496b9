"""A vLLM replica's processes: none is left behind, whatever ends first, and a lost one is an error at once."""

import os
import shutil
import signal
import urllib.error
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from openai_client import ask, complete

from enginehouse.controller import RemoteError, WorkerDied
from enginehouse.errors import ModelError
from enginehouse_testing.models import tiny_model
from enginehouse_vllm.orphans import find_named_memory

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
        url = group.call("launch", path, {"openai_endpoint": "loopback"})[0]
        started = beneath(group.call("pid")[0])
        assert [process.pid for process in started] == group.call("act", "processes")[0]
        with ThreadPoolExecutor(1) as thread:
            asked = thread.submit(complete, url, [5, 6, 7], 16000)
            result, left = group.call("act", "end")[0]
            assert asked.exception() is not None
        with pytest.raises(urllib.error.URLError, match="refused"):
            ask(f"{url}/models")
        assert result.completions[0].finish_reason == "abort"
        assert result.completions[0].token_ids
        assert left == []
        assert psutil.wait_procs(started, timeout=SECONDS)[1] == []
        with pytest.raises(RemoteError, match="not launched"):
            group.call("act", "generate", [[5]], {})


def test_a_lost_engine_core_is_an_error_of_every_call_at_once(replica, path):
    with replica() as group:
        url = group.call("launch", path, {"openai_endpoint": "node"})[0]
        assert ask(f"{url}/models")["data"]
        with pytest.raises(urllib.error.HTTPError, match="404"):
            ask(url.replace("/v1", "/metrics"))
        raised = group.call("act", "lose_engine_core")[0]
        assert {name for name, _ in raised} == {"VLLMFailed"}
        assert all("engine core has died" in said for _, said in raised)
        assert all("SIGKILL" in said for _, said in raised[1:])
        with pytest.raises(urllib.error.HTTPError, match="503") as refused:
            complete(url, [5], 2)
        assert "engine core has died" in refused.value.read().decode()


def test_the_processes_of_a_killed_worker_end_and_leave_no_shared_memory(replica, path):
    with replica() as group:
        group.call("launch", path, {"tensor_parallel": 2})
        pid = group.call("pid")[0]
        started = beneath(pid)
        assert len(started) == 3  # the engine core, and a worker for each part of the model
        shared = {path for process in started for path in find_named_memory(process.pid)}
        assert any(path.name.startswith("psm_") for path in shared)  # by which they talk to each other
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerDied):
            group.call("act", "processes")
        assert psutil.wait_procs(started, timeout=SECONDS)[1] == []
        assert not [path for path in shared if path.exists()]


def test_a_model_that_vllm_cannot_run_is_refused_at_launch(replica, path, tmp_path):
    with replica() as group:
        with pytest.raises(RemoteError, match="value") as refused:
            group.call("launch", path, {}, "value")
        assert isinstance(refused.value.cause, ModelError)
        with pytest.raises(RemoteError, match=r"no config\.json") as refused:
            group.call("launch", str(tmp_path), {})
        assert isinstance(refused.value.cause, ModelError)
        odd = shutil.copytree(tiny_model(), tmp_path / "odd")  # heads of 16, which vLLM's CPU attention does not take
        with pytest.raises(RemoteError, match=r"cannot generate with it .*: \w+Error: .*head_dim=16") as refused:
            group.call("launch", str(odd), {})
        assert isinstance(refused.value.cause, ModelError)
        assert beneath(group.call("pid")[0]) == []
        for file in odd.glob("tokenizer*"):
            file.unlink()
        with pytest.raises(RemoteError, match="endpoint needs a tokenizer"):
            group.call("launch", str(odd), {"openai_endpoint": "loopback"})
