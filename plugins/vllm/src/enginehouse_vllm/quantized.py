"""Checks, in a process of vLLM, that each load of weights also makes the quantized weights and their scales anew.

vLLM quantizes linear layers itself while it loads (`quantization`). No parameter of these layers is a copy of what was
sent, so `weights/read_back.py` cannot compare them. Here each layer is compared twice: what vLLM made, multiplied by
its scales, with the weights that it made it from; and what the layer holds in the end with what vLLM made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from enginehouse.engines.weights import WeightSyncError
from enginehouse.errors import listed
from enginehouse.weights.checksums import checksum, mixed_checksum

ROUNDING, LEAST_STEP = 1.01 * 2**-4, 1.01 * 2**-10
"""Largest error of a number that is rounded to float8_e4m3fn, which has three bits of mantissa: as a fraction of the
number or, near 0, in multiples of the scale. The hundredth is for the division by the scale."""

LARGEST, LEAST_CHANNEL = 448.0, 1 / 512
"""Largest number of float8_e4m3fn, and the least largest weight of an output channel for which vLLM makes a scale."""

ROWS_AT_ONCE = 4096
"""Output channels that are compared at once, because a device may have little free memory."""


class QuantizedLayers:
    """The quantized layers of a model during one load.

    Use `watch` around everything that fills the model, then call `compare`.
    """

    def __init__(self) -> None:
        self._made: dict[int, list[str]] = {}  # checksums of what vLLM made, by `id` of the layer
        self._differing: list[str] = []  # layers that differ from what they were made from

    @contextmanager
    def watch(self, model: torch.nn.Module) -> Iterator[None]:
        """Return a context in which each layer is compared with the weights that it is made from."""
        layers = quantized_layers(model)
        for name, layer in layers.items():
            method = layer.quant_method
            method.process_weights_after_loading = self._watched(name, method.process_weights_after_loading)
        try:
            yield
        finally:
            for layer in layers.values():
                del layer.quant_method.process_weights_after_loading

    def _watched(self, name: str, process: Callable[[torch.nn.Module], None]) -> Callable[[torch.nn.Module], None]:
        def process_and_compare(layer: torch.nn.Module) -> None:
            sent = layer.weight.detach()
            process(layer)
            if is_plain(layer, sent) and not is_rounded(layer.weight, layer.weight_scale, sent, has_parts(layer)):
                self._differing.append(name)  # an error here would leave vLLM's other processes waiting
            self._made[id(layer)] = sums_of(layer)

        return process_and_compare

    def compare(self, model: torch.nn.Module) -> None:
        """Check that each quantized layer holds what vLLM made of it in this load.

        Raises:
            WeightSyncError: a layer differs from what was sent by more than rounding, was not quantized anew, or holds
                something else. The message names it.
        """
        if self._differing:
            raise WeightSyncError(
                f"vllm's quantized {listed(self._differing)} is not what was sent, rounded to 8 bits", self._differing
            )
        layers = quantized_layers(model).items()
        wrong = [name for name, layer in layers if self._made.get(id(layer)) != sums_of(layer)]
        if wrong:
            raise WeightSyncError(f"vllm did not quantize {listed(wrong)} anew from the sent weights", wrong)


def quantized_layers(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the layers that vLLM quantizes, by name."""
    from vllm.model_executor.layers.quantization.online.fp8 import OnlineLinearBase

    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(getattr(layer, "quant_method", None), OnlineLinearBase)
    }


def is_plain(layer: torch.nn.Module, sent: torch.Tensor) -> bool:
    """Return True if a layer has a number of 8 bits for each sent number, and a scale for each output channel. A kernel
    may have its own order instead."""
    weight, scale = layer.weight, layer.weight_scale
    return (weight.dtype, weight.shape, scale.shape) == (torch.float8_e4m3fn, sent.t().shape, (len(sent), 1))


def has_parts(layer: torch.nn.Module) -> bool:
    """Return True if each process has only some inputs of a layer. A channel's scale is then that of all processes."""
    return bool(layer.input_size != layer.input_size_per_partition)


def is_rounded(quantized: torch.Tensor, scale: torch.Tensor, sent: torch.Tensor, parts: bool = False) -> bool:
    """Return True if quantized weights are the sent ones, up to rounding.

    Args:
        quantized: float8_e4m3fn `(inputs, outputs)`.
        scale: `(outputs, 1)`.
        sent: `(outputs, inputs)`.
        parts: True if `sent` has only some inputs, so that the largest weight of a channel may be elsewhere.
    """
    for begin in range(0, len(sent), ROWS_AT_ONCE):
        rows = slice(begin, begin + ROWS_AT_ONCE)
        exact, scales = sent[rows].float(), scale[rows].float()
        largest = exact.abs().amax(-1, keepdim=True).clamp_min(LEAST_CHANNEL)
        least = LEAST_STEP * (scales if parts else largest / LARGEST)
        error = (quantized.t()[rows].float() * scales - exact).abs()
        if not bool((error <= torch.maximum(ROUNDING * exact.abs(), least)).all()):  # nor with a NaN
            return False
    return True


def sums_of(layer: torch.nn.Module) -> list[str]:
    """Return checksums of the parameters of a layer, such as its quantized weights and their scales."""
    tensors = (tensor for _, tensor in sorted(layer.named_parameters(recurse=False)))
    return [(checksum if tensor.device.type == "cpu" else mixed_checksum)(tensor) for tensor in tensors]
