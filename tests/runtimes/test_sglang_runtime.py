"""SGLang's runtime for CPUs: what stands in for packages of GPUs says so when it is called.

That SGLang generates there is what the conformance suite sees.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from enginehouse.runtimes import Interpreter

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

PATIENCE = 600.0
"""Longest anything may take, in seconds."""


def command(runtime: Interpreter, *arguments: str) -> tuple[list[str], dict[str, str]]:
    """A command of the runtime's interpreter, and its environment variables."""
    return [str(runtime.python), *arguments], {**os.environ, **runtime.env, "HF_HUB_OFFLINE": "1"}


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
        assert found["said"][name].startswith(f"{name} was called on a CPU"), name


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
    program = "from enginehouse_sglang.on_cpu import stand_ins\nstand_ins.install()\nimport triton\nprint('true')"
    assert run(sglang_runtime, program + "\nassert triton.real", "--device", "cuda", PYTHONPATH=path) is True
