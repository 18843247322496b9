"""SGLang in its runtime for CPUs: it generates, and what stands in for packages of GPUs says so when it is called."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from enginehouse.plugin.runtimes import Interpreter
from enginehouse.testing.models import VOCABULARY_SIZE, tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

PATIENCE = 600.0
"""Longest anything may take, in seconds."""


def command(runtime: Interpreter, *arguments: str) -> tuple[list[str], dict[str, str]]:
    """A command of the runtime's interpreter, and its environment variables."""
    return [str(runtime.python), *arguments], {**os.environ, **runtime.env, "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def url(sglang_runtime: Interpreter, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """SGLang's server with a tiny model, started as SGLang's documentation does but for the module's name."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words, env = command(
        sglang_runtime, "-m", "enginehouse_sglang.serve", "--model-path", tiny_model(), "--device", "cpu",
        "--dtype", "float32", "--attention-backend", "torch_native", "--enable-deterministic-inference",
        "--max-total-tokens", "4096", "--max-running-requests", "16", "--skip-server-warmup", "--port", str(port),
    )  # fmt: skip
    log = tmp_path_factory.mktemp("sglang") / "server.log"
    with log.open("w") as lines:
        server = subprocess.Popen(words, env=env, stdout=lines, stderr=subprocess.STDOUT)
    try:
        _wait_for(f"http://127.0.0.1:{port}/health", server, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _wait_for(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while server.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=PATIENCE):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    pytest.fail(f"SGLang's server did not come up:\n{log.read_text()[-4000:]}")


def generate(url: str, prompts: list[list[int]], seeds: list[int]) -> list[list[int]]:
    """Token ids drawn after some prompts, each with a seed of its own."""
    parameters = [{"max_new_tokens": 12, "temperature": 1.0, "ignore_eos": True, "sampling_seed": one} for one in seeds]
    asked = json.dumps({"input_ids": prompts, "sampling_params": parameters}).encode()
    request = urllib.request.Request(f"{url}/generate", asked, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        return [one["output_ids"] for one in json.load(answer)]


def test_the_server_generates_tokens_of_the_model(url: str):
    (drawn,) = generate(url, [[5, 6, 7]], [1])
    assert len(drawn) == 12
    assert all(0 <= token < VOCABULARY_SIZE for token in drawn)


def test_a_request_draws_the_same_with_its_seed_whatever_is_drawn_beside_it(url: str):
    together = generate(url, [[5, 6, 7], [8, 9], [5, 6, 7]], [1, 2, 3])
    assert generate(url, [[5, 6, 7]], [1]) == together[:1]
    assert generate(url, [[8, 9]], [2]) == together[1:2]
    assert together[0] != together[2]


def run(runtime: Interpreter, program: str, *arguments: str, **variables: str) -> Any:
    """What a program prints, as JSON, that begins as SGLang's processes do."""
    begin = "import json, sys\nfrom enginehouse_sglang import on_cpu, serve\n"
    words, env = command(runtime, "-c", begin + program, *arguments)
    ran = subprocess.run(words, env=env | variables, capture_output=True, text=True, timeout=PATIENCE)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


CALLS = """
import torch, torchvision, triton, triton.language as tl, sgl_kernel
from sgl_kernel.flash_attn import flash_attn_varlen_func

@triton.jit
def kernel(x, n: tl.constexpr):
    pass

boxes = torch.zeros(1, 4)
calls = {
    "triton kernel __main__.kernel": lambda: kernel[(1,)](boxes, 4),
    "triton.language.load": lambda: tl.load(boxes),
    "triton.runtime.driver.active.get_current_device": lambda: triton.runtime.driver.active.get_current_device(),
    "sgl_kernel.silu_and_mul": lambda: sgl_kernel.silu_and_mul(boxes),
    "sgl_kernel.flash_attn.flash_attn_varlen_func": lambda: flash_attn_varlen_func(boxes),
    "torchvision.ops.nms": lambda: torch.ops.torchvision.nms(boxes, torch.zeros(1), 0.5),
}
said = {}
for name, call in calls.items():
    try:
        call()
    except on_cpu.NotOnCPU as error:
        said[name] = str(error)
print(json.dumps({"said": said, "calls": list(calls)}))
"""


def test_what_only_stands_in_says_its_name_when_it_is_called(sglang_runtime: Interpreter):
    found = run(sglang_runtime, CALLS, "--device", "cpu")
    for name in found["calls"]:
        assert found["said"][name].startswith(f"{name} was called, and this is a CPU"), name


def test_nothing_stands_in_for_anything_on_a_gpu(sglang_runtime: Interpreter):
    program = """
from importlib.util import find_spec
print(json.dumps({name: find_spec(name) is not None for name in ("triton", "sgl_kernel")}))
"""
    absent = {"triton": False, "sgl_kernel": False}
    assert run(sglang_runtime, program, "--device", "cuda") == absent
    assert run(sglang_runtime, program, SGLANG_USE_CPU_ENGINE="0") == absent
    assert run(sglang_runtime, program, "--device=cpu") == {"triton": True, "sgl_kernel": True}


def test_what_is_installed_is_not_stood_in_for(sglang_runtime: Interpreter, tmp_path: Path):
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text("real = True")
    path = os.pathsep.join([sglang_runtime.env["PYTHONPATH"], str(tmp_path)])
    program = "from enginehouse_sglang.on_cpu import stand_ins\nstand_ins.put_in()\nimport triton\nprint('true')"
    assert run(sglang_runtime, program + "\nassert triton.real", "--device", "cuda", PYTHONPATH=path) is True
