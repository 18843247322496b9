"""Detects which of an engine's requirement sets fits this machine."""

from __future__ import annotations

import os
import re
from pathlib import Path


def visible_gpus() -> int:
    """Return the number of CUDA devices for this process, by `CUDA_VISIBLE_DEVICES` or the driver's device files."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = sum(bool(re.fullmatch(r"nvidia\d+", entry.name)) for entry in Path("/dev").iterdir())
    if visible is None or not devices:
        return devices
    return len([name for name in visible.split(",") if name.strip() and name.strip() != "-1"])


def detect_variant() -> str:
    """Return `"cuda"` if GPUs are visible, else `"cpu"`."""
    return "cuda" if visible_gpus() else "cpu"
