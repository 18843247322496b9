"""Finds the kind of device that a run uses and the dtype that it computes in, without importing torch."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Literal, NamedTuple

from enginehouse.engines.model import Device
from enginehouse.runtimes import variant
from enginehouse_rl.config.counting import count

GPUS_GIB = {
    "B200": 178.0,
    "H200": 139.0,
    "H100": 79.0,
    "A100": 79.0,
    "A100-40": 39.0,
    "L40S": 44.0,
    "A6000": 47.0,
    "A10": 22.0,
    "L4": 22.0,
    "RTX4090": 23.0,
}
"""Usable memory of each kind of GPU, in GiB. It is less than the nominal memory of the GPU."""


class Gpu(NamedTuple):
    """A GPU's name, and the size of its memory in bytes."""

    name: str
    size: int

    @classmethod
    def from_kind(cls, kind: str) -> Gpu:
        return cls(kind, int(GPUS_GIB[kind] * 2**30))


class Assumed(NamedTuple):
    """The GPUs that a plan assumes in place of the GPUs of this machine."""

    number: int
    gpu: Gpu | None


_assumed: ContextVar[Assumed | None] = ContextVar("assumed", default=None)


@contextmanager
def assume_gpus(number: int, gpu: Gpu | None) -> Iterator[None]:
    """Make plans within the block as if this machine had exactly `number` visible GPUs."""
    token = _assumed.set(Assumed(number, gpu))
    try:
        yield
    finally:
        _assumed.reset(token)


def gpus_are_assumed() -> bool:
    """True if plans are made for assumed GPUs, and not for the GPUs of this machine."""
    return _assumed.get() is not None


def gpus_are_known(address: str | None) -> bool:
    """True if `visible_gpus` counts the GPUs that the run will have; `address` is `cluster.address`."""
    return gpus_are_assumed() or not address


def visible_gpus() -> int:
    """Return the number of GPUs that the run may use on this machine, or the assumed number."""
    assumed = _assumed.get()
    return variant.visible_gpus() if assumed is None else assumed.number


def find_gpu() -> Gpu | None:
    """Return the GPU with the least memory that `nvidia-smi` lists on this machine, or the assumed GPU; None if
    unknown."""
    if (assumed := _assumed.get()) is not None:
        return assumed.gpu
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=memory.total,name", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
        rows = [line.partition(",") for line in output.strip().splitlines()]
        return min((Gpu(name.strip(), int(mib) * 2**20) for mib, _, name in rows), key=lambda gpu: gpu.size)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


Dtype = Literal["float32", "bfloat16"]


def torch_has_cuda() -> bool:
    """True if the installed torch is a CUDA (or ROCm) build."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        return False
    libraries = Path(spec.origin).parent / "lib"
    return any((libraries / name).exists() for name in ("libtorch_cuda.so", "torch_cuda.dll", "libtorch_hip.so"))


def pick_device(device: Literal["auto", "cpu", "cuda"]) -> tuple[Device, str]:
    """Return the device that `cluster.device` stands for, `"cpu"` or `"cuda"`, and the reason."""
    if device != "auto":
        return device, "cluster.device"
    gpus = visible_gpus()
    if gpus and gpus_are_assumed():
        return "cuda", f"as if {count(gpus, 'GPU')} were here"
    if not gpus:
        return "cpu", "no GPU is visible here"
    if not torch_has_cuda():
        return "cpu", "the installed torch is built without CUDA"
    return "cuda", count(gpus, "visible GPU")


def pick_dtype(dtype: Literal["auto"] | Dtype, device: Device) -> Dtype:
    """Return the dtype that `model.dtype` stands for on a device."""
    if dtype != "auto":
        return dtype
    return "bfloat16" if device == "cuda" else "float32"


BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16", "svebf16"})
"""Flags in `/proc/cpuinfo` of x86 and ARM CPUs that have bfloat16 instructions."""


def cpu_has_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """True if this machine's CPU has bfloat16 instructions, or if that is unknown."""
    try:
        lines = cpuinfo.read_text(errors="replace").splitlines()
    except OSError:
        return True
    flags = [line.partition(":")[2].split() for line in lines if line.lower().startswith(("flags", "features"))]
    return not flags or not BFLOAT16_FLAGS.isdisjoint(flags[0])
