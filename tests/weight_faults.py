"""Faults inside an engine's process, for fault injection only: what its model holds is changed right after a load.

The file that the environment variable `WEIGHT_FAULT` names says which fault comes next. It is emptied by the process
that applies the fault, so that the old version comes back without one.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from enginehouse.weights.read_back import ReadBack


def one_bit(held: torch.Tensor) -> None:
    """The lowest bit of one number: 1e-7 of it."""
    held.view(torch.int32).view(-1)[7] ^= 1


def swapped(held: torch.Tensor) -> None:
    """The first two of what is counted along the first dimension: rows, or experts."""
    held[[0, 1]] = held[[1, 0]]


FAULTS: dict[str, tuple[str, Callable[[torch.Tensor], None]]] = {
    "one bit of a norm": ("model.layers.1.input_layernorm.weight", one_bit),
    "the sign of the last norm": ("model.norm.weight", torch.Tensor.neg_),
    "two rows of the queries": ("model.layers.0.self_attn.qkv_proj.weight", swapped),
    "the scale of a channel": ("model.layers.1.mlp.down_proj.weight_scale", lambda held: held[5].mul_(1.5)),
    "two experts": ("model.layers.1.mlp.experts.w2_weight", swapped),
}
"""What is changed in a model of vLLM or SGLang, by its own name, and how."""


def change(model: torch.nn.Module) -> None:
    """Apply the fault that is to come next, if there is one."""
    file = Path(os.environ["WEIGHT_FAULT"])
    if fault := file.read_text():
        file.write_text("")
        name, spoil = FAULTS[fault]
        spoil(dict(model.named_parameters())[name].data)


def change_adapter(manager: Any) -> None:
    """Change one bit of the adapter that vLLM or SGLang computes with, if the file has anything in it."""
    file = Path(os.environ["WEIGHT_FAULT"])
    if not file.read_text():
        return
    file.write_text("")
    if pool := getattr(manager, "memory_pool", None):  # SGLang's
        one_bit(pool.A_buffer["qkv_proj"][1][pool.get_buffer_id(next(iter(manager.lora_refs)))])
    else:
        one_bit(manager.modules["model.layers.1.self_attn.qkv_proj"].lora_a_stacked[0])


def install_for_quantized(_worker: Any) -> None:
    """Have faults applied in one of vLLM's processes, while it quantizes and before the comparison."""
    from vllm.model_executor.layers.quantization.online.fp8 import Fp8PtpcOnlineLinearMethod as Method

    install()
    process = Method.process_weights_after_loading

    def spoilt(self: Any, layer: torch.nn.Module) -> None:
        file = Path(os.environ["WEIGHT_FAULT"])
        fault, sent = file.read_text(), layer.weight.detach()
        if fault not in QUANTIZED_FAULTS:
            process(self, layer)
            return
        file.write_text("")
        if fault == "not quantized anew":
            layer.weight_scale = torch.nn.Parameter(torch.ones(len(sent), 1), requires_grad=False)
            layer.weight = torch.nn.Parameter(torch.empty_like(sent, dtype=torch.float8_e4m3fn).t(), False)
            return  # what is copied into place is whatever the memory held
        process(self, layer)
        if fault == "no scales":
            layer.weight.data.copy_(sent.t())
            layer.weight_scale.data.fill_(1)
        else:  # other scales than the weights were divided by
            layer.weight_scale.data.copy_(layer.weight_scale.flip(0))

    patch.object(Method, "process_weights_after_loading", spoilt).start()


QUANTIZED_FAULTS = ("not quantized anew", "no scales", "other scales")


def install_in(adapters: Any) -> None:
    """Have that fault applied in this process, between the load of an adapter and the comparison in a module."""
    compare = adapters.read_back

    def spoilt(manager: Any, *args: Any) -> Any:
        change_adapter(manager)
        return compare(manager, *args)

    patch.object(adapters, "read_back", spoilt).start()


def install_for_adapter(_worker: Any) -> None:
    """Have that fault applied in one of vLLM's processes."""
    from enginehouse_vllm import adapters

    install_in(adapters)


def save_layer(worker: Any, name: str, file: str) -> None:
    """Write the parameters of a layer of vLLM's model to a file."""
    held = worker.model_runner.get_model().get_submodule(name)
    torch.save({key: parameter.data for key, parameter in held.named_parameters()}, file)


def install(_worker: Any = None) -> None:
    """Have faults applied in this process, between a load and the comparison."""
    compare = ReadBack.compare

    def spoilt(self: ReadBack, model: torch.nn.Module, *args: Any) -> Any:
        change(model)
        return compare(self, model, *args)

    patch.object(ReadBack, "compare", spoilt).start()


LOADER = f"{__name__}.load"


def load(model: Any, named_tensors: Any) -> None:
    """SGLang's loader, with faults."""
    from enginehouse_sglang import adapter_loader, loader

    if ReadBack.compare.__name__ != "spoilt":
        install()
        install_in(adapter_loader)
    loader.load(model, named_tensors)
