"""Lets torchvision be imported with a torch for CPUs.

The operators of its wheel on the package index do not load then, because they are linked with CUDA. The import fails
where it describes them to the compiler ("operator torchvision::nms does not exist"). SGLang and transformers import
torchvision for images (`sglang/srt/configs/deepseek_ocr.py:7`).
"""

from __future__ import annotations

import importlib.machinery
from contextlib import suppress
from pathlib import Path
from typing import Any

from enginehouse_sglang.on_cpu import NotOnCPU

OPERATORS = ("nms", "qnms")
"""Operators that torchvision describes without a check that they exist; both have the same signature."""

SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def declare_operators() -> None:
    """Declare the operators that torchvision is about to describe, unless torchvision's own operators can be loaded."""
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
        torch.library.impl(f"torchvision::{name}", "cpu", _make_refusal(f"torchvision.ops.{name}"))


def _make_refusal(name: str) -> Any:
    def refuse(*_args: Any, **_kwargs: Any) -> Any:
        raise NotOnCPU(name)

    return refuse
