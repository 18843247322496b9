"""What lets torchvision be imported beside a torch for CPUs.

Its wheel on the package index is linked with CUDA: its operators do not load, and torchvision, which goes on without
them, then stops where it describes them to the compiler ("operator torchvision::nms does not exist"). SGLang and
transformers import it for images (`sglang/srt/configs/deepseek_ocr.py:7`).
"""

from __future__ import annotations

import importlib.machinery
from contextlib import suppress
from pathlib import Path
from typing import Any

from enginehouse_sglang.on_cpu import NotOnCPU

OPERATORS = ("nms", "qnms")
"""Those described without asking whether they are there; both take and give the same."""

SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def declare_operators() -> None:
    """Declare the operators that torchvision is about to describe, where its own cannot be loaded."""
    import torch

    spec = importlib.machinery.PathFinder.find_spec("torchvision")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for library in Path(folder).glob("_C*.so"):
            with suppress(OSError):
                torch.ops.load_library(str(library))
    for name in OPERATORS:
        if hasattr(torch.ops.torchvision, name):
            continue
        torch.library.define(f"torchvision::{name}", SIGNATURE)
        torch.library.impl(f"torchvision::{name}", "cpu", _refusal(f"torchvision.ops.{name}"))


def _refusal(name: str) -> Any:
    def refuse(*_arguments: Any, **_named: Any) -> Any:
        raise NotOnCPU(name)

    return refuse
