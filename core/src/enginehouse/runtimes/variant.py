"""Which of a backend's requirement sets this machine is for."""

from __future__ import annotations

import os
import re
from pathlib import Path


def visible_gpus() -> int:
    """Number of CUDA devices this process may use: `CUDA_VISIBLE_DEVICES`, else the driver's device files."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = sum(bool(re.fullmatch(r"nvidia\d+", entry.name)) for entry in Path("/dev").iterdir())
    if visible is None or not devices:
        return devices
    return len([one for one in visible.split(",") if one.strip() and one.strip() != "-1"])


def detect_variant() -> str:
    """`"cuda"` where GPUs are visible, else `"cpu"`."""
    return "cuda" if visible_gpus() else "cpu"
