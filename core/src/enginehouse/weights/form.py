"""What a model's weights are, without their values: for engines that load models themselves and cannot be asked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from enginehouse.engines.model import ModelSpec
from enginehouse.errors import ModelError, listed
from enginehouse.quiet import quiet_transformers
from enginehouse.weights.names import tied_names, unique_state


@dataclass(frozen=True, slots=True)
class ModelForm:
    """What a model's weights are in its checkpoint, without their values.

    Attributes:
        parameters: shape and dtype by Hugging Face name.
        tied: further names of parameters that are listed under another.
    """

    parameters: Mapping[str, tuple[tuple[int, ...], str]]
    tied: frozenset[str]

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, torch.Tensor], tied: frozenset[str]) -> ModelForm:
        """That of weights that are here."""
        return cls(
            {name: (tuple(one.shape), str(one.dtype).removeprefix("torch.")) for name, one in tensors.items()}, tied
        )

    @classmethod
    def of(cls, spec: ModelSpec) -> ModelForm:
        """Ask transformers, on the meta device.

        Raises:
            ModelError: transformers does not know the model.
        """
        from transformers import AutoConfig, AutoModelForCausalLM

        settings: dict[str, Any] = {"trust_remote_code": spec.trust_remote_code}
        try:
            with quiet_transformers(), torch.device("meta"):
                config = AutoConfig.from_pretrained(spec.path, local_files_only=True, **settings)
                model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, spec.dtype), **settings)
        except Exception as error:
            raise ModelError(
                f"the weights of {spec.path!r} cannot be updated: what they are called is asked of transformers, "
                f"which says {type(error).__name__}: {error}"
            ) from error
        stored = _stored_shapes(Path(spec.path))
        names = frozenset(stored)
        state = unique_state(model, names)
        own = {name: tensor for name, tensor in state.items() if name in stored}
        form = cls.of_tensors(own, tied_names(model, names))
        elements = sum(tensor.numel() for name, tensor in state.items() if name not in own)
        if not elements:
            return form
        # Experts: stored one by one, run as one tensor.
        known = model.state_dict()
        parts = {name: shape for name, shape in stored.items() if name not in known}
        if sum(math.prod(shape) for shape in parts.values()) != elements:
            lacking = listed([name for name in state if name not in own])
            raise ModelError(f"the weights of {spec.path!r} cannot be updated: its files do not hold {lacking}")
        return cls({**form.parameters, **{name: (shape, spec.dtype) for name, shape in parts.items()}}, form.tied)


def _stored_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors in a directory's safetensors files, by name."""
    from safetensors import safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    for file in path.glob("*.safetensors"):
        with safe_open(str(file), framework="pt") as tensors:
            shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    return shapes
