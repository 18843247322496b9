"""Low-rank adapters of megatron-core's linear layers: an A and a B of their own for each matrix of the checkpoint.

A layer of megatron-core joins matrices: `linear_qkv` those of queries, keys and values. `peft` adapts each of them
separately, so each has its own A and B here, and their outputs are joined as the layer joins its rows (`Form.join`).
If tensor parallelism splits a layer by outputs, so are its B, and every rank has the whole A. If it splits the layer by
inputs, so are its A, and every rank has the whole B.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes

from enginehouse.errors import ConfigError
from enginehouse_megatron.forms import Heads, Whole
from enginehouse_megatron.output_layer import ValueHead
from enginehouse_megatron.weight_map import MappedParameter, StoredTensor
from enginehouse_torch.modeling.adapters import draw_down, name_in_file

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    from enginehouse.engines.options import LoraOptions


class Adapter(torch.nn.Module):
    """This rank's parts of A and B of one stored matrix."""

    def __init__(self, down: torch.Tensor, up: torch.Tensor):
        super().__init__()
        self.down, self.up = torch.nn.Parameter(down), torch.nn.Parameter(up)


class LayerAdapters(torch.nn.Module):
    """The adapters of a linear layer of megatron-core: of each matrix that it joins, or of some of them.

    Args:
        entry: the layer's weight, which joins the stored matrices.
        adapters: the adapters by the name of their stored matrix.
        heads: sizes of the attention.
        scale: factor of the product of B and A.
        sequence_parallel: True if the tokens between split matrices are split too.
    """

    def __init__(
        self,
        entry: MappedParameter,
        adapters: Mapping[str, Adapter],
        heads: Heads,
        scale: float,
        sequence_parallel: bool,
    ):
        super().__init__()
        self.adapters = torch.nn.ModuleList(adapters.values())
        self.enabled = True
        self._by_name = dict(adapters)
        self._form, self._heads, self._scale = entry.form, heads, scale
        parts = entry.form.separate(entry.parameter.detach(), heads)
        self._rows = {stored.name: len(part) for stored, part in zip(entry.stored, parts, strict=True)}
        self._splits_tokens = sequence_parallel

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what the adapters add to the layer's output, from the input of its matrices."""
        down = torch.cat([adapter.down for adapter in self._by_name.values()])
        return self._scale * F.linear(self._exchange(F.linear(hidden, down)), self._join_ups())

    def _exchange(self, down: torch.Tensor) -> torch.Tensor:
        """Give each rank the products with A that its part of B needs, as the layer exchanges its tokens."""
        if self._form.split == 0:
            whole = (
                gather_from_sequence_parallel_region if self._splits_tokens else copy_to_tensor_model_parallel_region
            )
        elif self._splits_tokens:
            whole = reduce_scatter_to_sequence_parallel_region
        else:
            whole = reduce_from_tensor_model_parallel_region
        return whole(down, group=parallel_state.get_tensor_model_parallel_group())

    def _join_ups(self) -> torch.Tensor:
        """Join this rank's parts of B, `(own outputs of the layer, ranks of all adapters together)`."""
        ups = {name: adapter.up for name, adapter in self._by_name.items()}
        columns = dict(zip(ups, torch.block_diag(*ups.values()).split([len(up) for up in ups.values()]), strict=True))
        width = sum(up.shape[1] for up in ups.values())
        some = next(iter(ups.values()))
        parts = [columns[name] if name in ups else some.new_zeros(rows, width) for name, rows in self._rows.items()]
        return self._form.join(parts, self._heads)

    def merge(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a stored matrix with its adapter added, computed in float32, in its own dtype."""
        if name not in self._by_name:
            return part
        adapter = self._by_name[name]
        up, down = adapter.up.detach().float(), adapter.down.detach().float()
        return torch.addmm(part.float(), up, down, alpha=self._scale).to(part.dtype)


@dataclass(frozen=True, slots=True)
class Adapted:
    """This rank's parameters of the base model, each with its adapters, and the adapters' own parameters."""

    base: list[MappedParameter]
    adapters: list[MappedParameter]


def add_adapters(
    models: Sequence[GPTModel],
    mapped: Sequence[MappedParameter],
    layers: Iterable[str],
    lora: LoraOptions,
    settings: TransformerConfig,
    heads: Heads,
    seed: int,
) -> Adapted:
    """Add adapters to this rank's parts of the model; freeze all but the adapters and a value head.

    Args:
        mapped: this rank's parameters.
        layers: names of the layers of the whole model that have adapters (`choose_layers`).
        seed: seed of the initial values.

    Raises:
        ConfigError: the model's norms are not those that `_attach` computes.
    """
    if settings.normalization != "RMSNorm" or settings.layernorm_zero_centered_gamma:
        raise ConfigError("megatron: lora: this engine adapts only models with plain RMSNorm, without centered weights")
    matrices = {f"{layer}.weight" for layer in layers}
    numbers = {id(entry.parameter): number for number, entry in enumerate(mapped)}
    adapted = Adapted(list(mapped), [])
    for model in models:
        model.requires_grad_(False)
        if model.pre_process:
            model.embedding.register_forward_hook(_ask_for_gradient)
        for module in list(model.modules()):
            if isinstance(module, ValueHead):
                module.requires_grad_(True)
            if (number := numbers.get(id(getattr(module, "weight", None)))) is None:
                continue
            entry = mapped[number]
            adapters = {
                stored.name: _make_adapter(entry.parameter, stored, lora, settings, seed)
                for stored in entry.stored
                if stored.name in matrices
            }
            if adapters:
                added = LayerAdapters(entry, adapters, heads, lora.alpha / lora.rank, settings.sequence_parallel)
                _attach(module, added, settings)
                adapted.base[number] = replace(entry, adapters=added)
                for stored in entry.stored:
                    if stored.name in adapters:
                        adapted.adapters.extend(_map(adapters[stored.name], stored))
    return adapted


def _make_adapter(
    weight: torch.Tensor, stored: StoredTensor, lora: LoraOptions, settings: TransformerConfig, seed: int
) -> Adapter:
    """Return this rank's part of a new adapter of a stored matrix, like the weight in dtype and device."""
    group = parallel_state.get_tensor_model_parallel_group()
    rows, columns = stored.find_region(group.rank(), group.size())
    down = draw_down(stored.name.removesuffix(".weight"), (lora.rank, stored.shape[1]), seed)[:, columns]
    adapter = Adapter(down.to(weight), weight.new_zeros(rows.stop - rows.start, lora.rank))
    part, whole = (adapter.up, adapter.down) if stored.split == 0 else (adapter.down, adapter.up)
    set_tensor_model_parallel_attributes(part, True, stored.split, 1)
    # finalize_model_grads sums the gradients of marked parameters over the ranks that share a sequence.
    whole.sequence_parallel = settings.sequence_parallel  # type: ignore[attr-defined]
    return adapter


def _attach(layer: torch.nn.Module, added: LayerAdapters, settings: TransformerConfig) -> None:
    """Let a linear layer of megatron-core add the results of adapters to its output."""
    layer.adapters = added

    def add(module: Any, args: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, Any]) -> Any:
        if not added.enabled:
            return output
        hidden = args[0]
        if (norm := getattr(module, "layer_norm_weight", None)) is not None:  # the layer's own norm, once more
            hidden = F.rms_norm(hidden, hidden.shape[-1:], norm, settings.layernorm_epsilon)
        return output[0] + added(hidden), *output[1:]

    layer.register_forward_hook(add)


def _map(adapter: Adapter, stored: StoredTensor) -> Iterator[MappedParameter]:
    """Yield A and B of a stored matrix with their names and places in a file of `peft`."""
    layer, rank = stored.name.removesuffix(".weight"), adapter.up.shape[1]
    for parameter, name, shape, split in (
        (adapter.down, name_in_file(layer, "A"), (rank, stored.shape[1]), 1 if stored.split == 1 else None),
        (adapter.up, name_in_file(layer, "B"), (stored.shape[0], rank), 0 if stored.split == 0 else None),
    ):
        yield MappedParameter(parameter, Whole(name, split), (StoredTensor(name, shape, split),))


def _ask_for_gradient(module: torch.nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
    """Let gradients flow from the first layer, although the embedding is frozen: a layer whose activations are
    recomputed gives none otherwise."""
    return output.detach().requires_grad_() if torch.is_grad_enabled() else output


@contextmanager
def disable_adapters(models: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Run the block without adapters."""
    layers = [module for model in models for module in model.modules() if isinstance(module, LayerAdapters)]
    try:
        for layer in layers:
            layer.enabled = False
        yield
    finally:
        for layer in layers:
            layer.enabled = True
