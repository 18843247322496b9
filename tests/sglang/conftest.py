"""Fixtures of the sglang backend's tests: the interpreter of its runtime, and a server somebody has started by hand."""

import contextlib
import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

START_SECONDS = 600.0


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):  # a server takes a minute to start, more on a busy machine
            item.add_marker(pytest.mark.timeout(1200))


@pytest.fixture(scope="session")
def runtime():
    """The interpreter that SGLang runs under, and the environment of its workers."""
    from replica_processes import runtime_of

    return runtime_of("sglang")


class ByHand:
    """A server started by the command of SGLang's documentation, as it is for a CPU.

    Args:
        url: its base URL.
        process: what it runs in.
    """

    def __init__(self, url: str, process: subprocess.Popen):
        self.url = url
        self.process = process

    def answers(self) -> bool:
        """Whether it does."""
        try:
            with urllib.request.urlopen(f"{self.url}/ready", timeout=60):
                return True
        except OSError:
            return False


@pytest.fixture(scope="session")
def served(runtime, tmp_path_factory):
    """Call it with a model's directory for a server of it, which ends with the `with` statement."""
    from enginehouse_sglang.process import find_free_port

    @contextlib.contextmanager
    def started(model: str, *arguments: str) -> Iterator[ByHand]:
        port = find_free_port("127.0.0.1")
        command = [
            runtime.python, "-m", "enginehouse_sglang.serve", "--model-path", model, "--port", str(port),
            "--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32",
            "--max-total-tokens", "20000", *arguments,
        ]  # fmt: skip
        log = tmp_path_factory.mktemp("server") / "log"
        with log.open("wb") as output:
            environment = {**os.environ, **runtime.env, "HF_HUB_OFFLINE": "1"}
            process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
        server = ByHand(f"http://127.0.0.1:{port}", process)
        try:
            limit = time.monotonic() + START_SECONDS
            while not server.answers():
                assert process.poll() is None, log.read_text()[-4000:]
                assert time.monotonic() < limit, log.read_text()[-4000:]
                time.sleep(0.5)
            yield server
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.wait()

    return started


@pytest.fixture(scope="session")
def replica(ray_cluster, runtime):
    """Call it for a worker process that holds an `SGLangReplica`, and that ends with the `with` statement."""
    from replica_processes import replica_process
    from sglang_acts import SGLangReplica

    return lambda **env: replica_process(SGLangReplica, runtime, "sglang", START_SECONDS, **env)
