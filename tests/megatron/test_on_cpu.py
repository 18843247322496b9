"""What megatron-core needs on a CPU is decided by the engine's device, not by what its process sees."""

import pytest
import torch

from enginehouse_megatron import on_cpu


class Adapted(Exception):
    """Stands in for the first thing that is done."""


def adapted(function: object) -> None:
    raise Adapted


@pytest.mark.parametrize("visible", [True, False])
def test_an_engine_on_a_cpu_is_adapted_where_a_gpu_is_visible_too(monkeypatch: pytest.MonkeyPatch, visible: bool):
    monkeypatch.setattr(on_cpu, "_done", False)
    monkeypatch.setattr(on_cpu, "_say_cpu", adapted)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: visible)
    on_cpu.adapt("cuda")
    with pytest.raises(Adapted):
        on_cpu.adapt("cpu")
