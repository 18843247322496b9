"""Finds the kind of device that a run uses, without importing torch, and the dtype that it computes in."""

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
"""Memory that programs can have of a GPU, which is less than its name says, by kind."""


class Gpu(NamedTuple):
    """A GPU: what it is called, and bytes of its memory."""

    name: str
    size: int

    @classmethod
    def of_kind(cls, kind: str) -> Gpu:
        """One of `GPUS_GIB`."""
        return cls(kind, int(GPUS_GIB[kind] * 2**30))


class Assumed(NamedTuple):
    """GPUs that a plan is made for, wherever it is made."""

    number: int
    gpu: Gpu | None


_assumed: ContextVar[Assumed | None] = ContextVar("assumed", default=None)


@contextmanager
def assumed_gpus(number: int, gpu: Gpu | None) -> Iterator[None]:
    """Within, plans are made as if so many GPUs were visible, and nothing else."""
    token = _assumed.set(Assumed(number, gpu))
    try:
        yield
    finally:
        _assumed.reset(token)


def gpus_are_assumed() -> bool:
    """Return whether plans are made for GPUs that are elsewhere."""
    return _assumed.get() is not None


def gpus_are_known(address: str | None) -> bool:
    """Return whether `visible_gpus` says how many GPUs the run will have; `address` is `cluster.address`."""
    return gpus_are_assumed() or not address


def visible_gpus() -> int:
    """Number of GPUs that the run may use on this machine, or on the one that is assumed."""
    assumed = _assumed.get()
    return variant.visible_gpus() if assumed is None else assumed.number


def gpu_here() -> Gpu | None:
    """The smallest GPU of this machine, as the driver's own tool tells; or the one that is assumed. None: not known."""
    if (assumed := _assumed.get()) is not None:
        return assumed.gpu
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=memory.total,name", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
        found = [line.partition(",") for line in told.strip().splitlines()]
        return min((Gpu(name.strip(), int(mib) * 2**20) for mib, _, name in found), key=lambda gpu: gpu.size)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


Dtype = Literal["float32", "bfloat16"]
"""The dtypes that a run may compute in."""


def torch_has_cuda() -> bool:
    """Return whether the installed torch is a CUDA (or ROCm) build."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        return False
    libraries = Path(spec.origin).parent / "lib"
    return any((libraries / name).exists() for name in ("libtorch_cuda.so", "torch_cuda.dll", "libtorch_hip.so"))


def pick_device(wanted: Literal["auto", "cpu", "cuda"]) -> tuple[Device, str]:
    """Resolve `cluster.device`.

    Args:
        wanted: `"auto"`, `"cpu"` or `"cuda"`.

    Returns:
        `"cpu"` or `"cuda"`, and why.
    """
    if wanted != "auto":
        return wanted, "cluster.device"
    gpus = visible_gpus()
    if gpus and gpus_are_assumed():
        return "cuda", f"as if {gpus} GPU{'s' if gpus > 1 else ''} were here"
    if not gpus:
        return "cpu", "no GPU is visible here"
    if not torch_has_cuda():
        return "cpu", "the installed torch is built without CUDA"
    return "cuda", f"{gpus} visible GPU{'s' if gpus > 1 else ''}"


def pick_dtype(wanted: Literal["auto"] | Dtype, device: Device) -> Dtype:
    """Resolve `model.dtype`.

    Args:
        wanted: `"auto"` or a dtype.
        device: torch device type of the run.
    """
    if wanted != "auto":
        return wanted
    return "bfloat16" if device == "cuda" else "float32"


BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16", "svebf16"})
"""Flags in `/proc/cpuinfo` of a CPU that multiplies bfloat16 by itself, x86 and ARM."""


def cpu_has_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return True if this machine's CPU has instructions for bfloat16, and where that is not known."""
    try:
        lines = cpuinfo.read_text(errors="replace").splitlines()
    except OSError:
        return True
    flags = [line.partition(":")[2].split() for line in lines if line.lower().startswith(("flags", "features"))]
    return not flags or not BFLOAT16_FLAGS.isdisjoint(flags[0])
