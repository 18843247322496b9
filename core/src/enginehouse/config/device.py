"""Which kind of device a run uses, found out without importing torch, and in which dtype it computes there."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Literal

from enginehouse.engines.model import Device, Dtype
from enginehouse.runtimes.variant import visible_gpus


def torch_has_cuda() -> bool:
    """Whether the installed torch is a CUDA (or ROCm) build."""
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
    if not gpus:
        return "cpu", "no GPU is visible here"
    if not torch_has_cuda():
        return "cpu", "the installed torch is built without CUDA"
    return "cuda", f"{gpus} visible GPU{'s' if gpus > 1 else ''}"


def pick_dtype(wanted: Literal["auto", "float32", "bfloat16"], device: Device) -> Dtype:
    """Resolve `model.dtype`.

    Args:
        wanted: `"auto"` or a dtype.
        device: torch device type of the run.
    """
    if wanted != "auto":
        return wanted
    return "bfloat16" if device == "cuda" else "float32"
