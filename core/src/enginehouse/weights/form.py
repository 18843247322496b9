"""Names, shapes and dtypes of a model's weights, for engines that load the model themselves and cannot report them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from enginehouse.engines.model import ModelSpec
from enginehouse.errors import ModelError, listed
from enginehouse.quiet import quiet_transformers
from enginehouse.weights.names import match_names, stored_shapes, tied_names, unique_state

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from enginehouse.engines.options import LoraOptions


@dataclass(frozen=True, slots=True)
class ModelForm:
    """Names, shapes and dtypes of a model's weights in its checkpoint.

    Attributes:
        parameters: shape and dtype by Hugging Face name.
        tied: names that `parameters` leaves out, because their tied parameter is listed under another name.
        is_adapter: True if `parameters` are A and B of all linear layers but the output layer. Then an update brings
            those of the adapted layers.
    """

    parameters: Mapping[str, tuple[tuple[int, ...], str]]
    tied: frozenset[str]
    is_adapter: bool = False

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, torch.Tensor], tied: frozenset[str]) -> ModelForm:
        """Return the names, shapes and dtypes of `tensors`."""
        forms = {
            name: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in tensors.items()
        }
        return cls(forms, tied)

    @classmethod
    def of(cls, spec: ModelSpec) -> ModelForm:
        """Find the names, shapes and dtypes of a model's weights with transformers, on the meta device.

        If `spec` has an adapter, find those of the matrices that an adapter may have, under their names in a `peft`
        file.

        Raises:
            ModelError: if transformers does not know the model, or the model's files lack weights.
        """
        from transformers import AutoConfig, AutoModelForCausalLM

        settings: dict[str, Any] = {"trust_remote_code": spec.trust_remote_code}
        try:
            with quiet_transformers(), torch.device("meta"):
                config = AutoConfig.from_pretrained(spec.path, local_files_only=True, **settings)
                model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, spec.dtype), **settings)
        except Exception as error:
            raise ModelError(
                f"the weights of {spec.path!r} cannot be updated: transformers cannot list their names: "
                f"{type(error).__name__}: {_shorten(error)}"
            ) from error
        stored = stored_shapes(Path(spec.path))
        state, further = unique_state(model, frozenset(stored)), tied_names(model, frozenset(stored))
        targets = {name: target.name for name, target in match_names(model, stored).items() if target.is_read}
        lacking = {name: state[name].numel() for name, _ in model.named_parameters() if name in state}
        for name, target in targets.items():
            if target in lacking:
                lacking[target] -= math.prod(stored[name])
        if missing := [name for name, elements in lacking.items() if elements]:
            raise ModelError(f"the weights of {spec.path!r} cannot be updated: its files do not hold {listed(missing)}")
        if spec.adapter is not None:
            return cls(_adapter_matrices(model, spec.adapter.rank, spec.dtype), frozenset(), is_adapter=True)
        parameters = {
            name: (stored[name], str(state[target].dtype).removeprefix("torch."))
            for name, target in targets.items()
            if target in state
        }
        return cls(parameters, further | {name for name, target in targets.items() if target in further})


def adapted_layers(adapter: LoraOptions, matrices: Iterable[str]) -> list[str]:
    """Return the last parts of the names of the layers that an adapter adapts, such as `q_proj`.

    Args:
        matrices: names of all matrices that the adapter may have (`ModelForm.parameters`).
    """
    layers = {name.split(".")[-3] for name in matrices}
    if adapter.targets != "all-linear":
        layers &= {target.rpartition(".")[2] for target in adapter.targets}
    return sorted(layers)


def _adapter_matrices(model: PreTrainedModel, rank: int, dtype: str) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shape and dtype of A and B of each linear layer but the output layer, by name."""
    matrices: dict[str, tuple[tuple[int, ...], str]] = {}
    output = model.get_output_embeddings()
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and layer is not output:
            matrices[f"base_model.model.{name}.lora_A.weight"] = (rank, layer.in_features), dtype
            matrices[f"base_model.model.{name}.lora_B.weight"] = (layer.out_features, rank), dtype
    return matrices


def _shorten(error: Exception) -> str:
    """Return transformers' message in one line, without its list of all classes."""
    return " ".join(line for line in str(error).splitlines() if len(line) < 500)
