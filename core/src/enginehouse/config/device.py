"""Which kind of device a run uses, found out without importing torch."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path
from typing import Literal

from enginehouse.engines.model import Device


def visible_gpus() -> int:
    """Number of CUDA devices this process may use: `CUDA_VISIBLE_DEVICES`, else the driver's device files."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = sum(bool(re.fullmatch(r"nvidia\d+", entry.name)) for entry in Path("/dev").iterdir())
    if visible is None or not devices:
        return devices
    return len([one for one in visible.split(",") if one.strip() and one.strip() != "-1"])


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
