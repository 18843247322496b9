"""Lets SGLang add adapters on a CPU, where it would pin memory for a GPU."""

from __future__ import annotations

from typing import Any

import torch


class _Unpinned:
    """`torch`, without pinned memory."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def tensor(self, *args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return torch.tensor(*args, **options)

    def zeros(self, *args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return torch.zeros(*args, **options)


def install() -> None:
    """Adapt SGLang's modules once it imports them. Call it before SGLang starts."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.lora.lora_manager.LoRAManager.__init__", _unpin, HookType.BEFORE)


def _unpin(*_args: Any, **_options: Any) -> None:
    from sglang.srt.lora import layers
    from sglang.srt.lora.backend import torch_backend

    layers.torch = torch_backend.torch = _Unpinned()  # type: ignore[attr-defined]
    torch.Tensor.pin_memory = lambda self, device=None: self  # type: ignore[method-assign]
