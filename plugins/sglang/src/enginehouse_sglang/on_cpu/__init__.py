"""Lets SGLang 0.5.21 to 0.5.23 run on a CPU. On a GPU, nothing of this package is used.

SGLang imports packages for GPUs on every machine, but calls them only on a GPU. This package replaces them by stand-ins
that can be imported, and raise `NotOnCPU` when they are called. The stand-ins exist only in processes of
`enginehouse_sglang.serve`, and only for packages that are not installed.

Each module is needed only until SGLang or the package index provides what it replaces:

* `triton.py` stands in for triton, until SGLang imports triton only where it is used.
* `sgl_kernel.py` stands in for sgl-kernel, until the package index has a build of sgl-kernel for CPUs.
* `torchvision.py` declares operators of torchvision, until the wheel of torchvision loads beside a torch for CPUs.
* `adapters.py` lets SGLang add adapters, until it pins memory only where there is a GPU.
* `seeds.py` lets a request's seed take effect, until SGLang accepts `torch_native` for deterministic inference.
* `sleeping.py` frees the memory that SGLang releases, until SGLang itself frees it on a CPU.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from enginehouse.runtimes import detect_variant

CPU_ENGINE = "SGLANG_USE_CPU_ENGINE"
"""SGLang's own environment variable. If it is 1, SGLang computes on the CPU. SGLang's child processes inherit it."""

VARIABLES = {
    CPU_ENGINE: "1",
    # Each sequence's attention is a separate call: OpenMP's threads would wait for one another more than they work.
    "OMP_NUM_THREADS": "1",
    # The sampler with seeds is compiled with a C++ compiler at its first call, which takes minutes, if there is one.
    "TORCHDYNAMO_DISABLE": "1",
}
"""Environment variables of SGLang's processes on a CPU, unless they are set already."""


class NotOnCPU(NotImplementedError):
    """SGLang called something that needs a GPU."""

    def __init__(self, name: str):
        package = name.partition(".")[0]
        super().__init__(
            f"{name} was called on a CPU, but {package} needs a GPU: enginehouse-sglang replaces it by a stand-in that "
            "can only be imported. The code that called it (see the traceback) cannot be used on a CPU"
        )


def is_cpu(arguments: Sequence[str]) -> bool:
    """Return True if SGLang's server runs on a CPU. The environment variable `CPU_ENGINE` decides if it is set, and
    otherwise the argument `--device`. Without both, the server runs on a CPU if this machine has no GPU."""
    if CPU_ENGINE in os.environ:
        return os.environ[CPU_ENGINE] == "1"
    for before, argument in zip(["", *arguments], arguments, strict=False):
        if before == "--device" or argument.startswith("--device="):
            return argument.removeprefix("--device=") == "cpu"
    return detect_variant() == "cpu"


def adapt() -> None:
    """Make SGLang run on this process's CPU. Call it before SGLang or torch is imported; a second call does nothing."""
    from enginehouse_sglang.on_cpu import seeds, sleeping, stand_ins

    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
    stand_ins.install()
    seeds.allow_deterministic_inference()
    sleeping.free_released_memory()
