"""Low-rank adapters (LoRA) as engines share them: the layers that have one, initial values, and the files of `peft`.

An adapter adds `alpha / rank * B @ A` to the weight of a linear layer. A is `(rank, in)`, B is `(out, rank)`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from enginehouse.errors import ConfigError, nearest
from enginehouse_torch.modeling.export import share_weights
from enginehouse_torch.modeling.files import CheckpointError

if TYPE_CHECKING:
    from peft import LoraConfig

    from enginehouse.engines.model import ProcessContext
    from enginehouse.engines.options import LoraOptions


def choose_layers(
    lora: LoraOptions,
    linear: Mapping[str, Sequence[int]],
    *,
    engine: str,
    model: str,
    output: str = "",
    tied: bool = False,
) -> list[str]:
    """Return the full names of the linear layers that `lora.targets` chooses, in the model's order.

    Args:
        linear: the shape of the weight of each linear layer, by the layer's name.
        engine: name of the engine, for errors.
        model: name of the model's class, for errors.
        output: name of the output layer, one of `linear` unless it is tied; empty: the model has none.
        tied: True if the weight of the output layer is the embedding's.

    Raises:
        ConfigError: a target is not a linear layer of the model, or is smaller than the rank.
    """
    everything = lora.targets == "all-linear"
    candidates = {name: shape for name, shape in linear.items() if name != output or not (everything or tied)}
    chosen = set(candidates) if everything else set()
    for target in [] if everything else lora.targets:
        matches = {name for name in candidates if _matches(target, name)}
        if not matches and output and _matches(target, output):
            raise ConfigError(f"{engine}: lora.targets: {target!r} cannot have adapters: it is tied to the embedding")
        if not matches:
            raise ConfigError(
                f"{engine}: lora.targets: {model} has no linear layer {target!r}. "
                + nearest(target, {name.rpartition(".")[2] for name in candidates})
            )
        chosen |= matches
    if not chosen:
        raise ConfigError(f"{engine}: lora: nothing to adapt: lora.targets is empty, or {model} has no linear layer")
    ordered = [name for name in candidates if name in chosen]
    smallest = min(ordered, key=lambda name: min(candidates[name]))
    if lora.rank > (most := min(candidates[smallest])):
        raise ConfigError(
            f"{engine}: lora.rank is {lora.rank}, but {smallest!r} has the shape {tuple(candidates[smallest])}: "
            f"lower the rank to at most {most}, or leave {smallest.rpartition('.')[2]!r} out of lora.targets"
        )
    return ordered


def _matches(target: str, name: str) -> bool:
    """Return True if a target is a module's full name or the end of it."""
    return name == target or name.endswith(f".{target}")


def draw_down(layer: str, shape: Sequence[int], seed: int) -> torch.Tensor:
    """Return the initial A of a layer, float32 on the CPU: uniform within `1 / sqrt(in)` as in `peft`.

    It depends on nothing but the arguments, so that each rank can draw the whole of it and keep its part.
    """
    digest = hashlib.sha256(f"{seed} {layer}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)
    return (2 * torch.rand(tuple(shape), generator=generator) - 1) * (1 / math.sqrt(shape[1]))


def name_in_file(layer: str, matrix: Literal["A", "B"]) -> str:
    """Return the name that A or B of a layer has in a file of `peft`."""
    return f"base_model.model.{layer}.lora_{matrix}.weight"


def peft_config(
    lora: LoraOptions, layers: Iterable[str], base: str | None = None, inference: bool = False
) -> LoraConfig:
    """Return the config with which `peft` adapts the given layers of the model `base`."""
    from peft import LoraConfig

    return LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,  # type: ignore[arg-type]
        target_modules=list(layers),
        base_model_name_or_path=base,
        inference_mode=inference,
    )


def write_adapter(
    directory: Path,
    lora: LoraOptions,
    base: str,
    layers: Iterable[str],
    modules: Iterable[str],
    weights: Mapping[str, torch.Tensor],
) -> None:
    """Write `adapter_model.safetensors` and `adapter_config.json`.

    Args:
        base: directory of the model that is adapted.
        layers: full names of the adapted layers.
        modules: full names of all modules of the model. The config names adapted layers by the ends of their names if
            these mean no other module.
        weights: A and B of each layer (`name_in_file`).
    """
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.cpu().contiguous() for name, tensor in weights.items()}, directory / "adapter_model.safetensors"
    )
    adapted = list(layers)
    endings = {name.rpartition(".")[2] for name in adapted}
    exact = {name for name in modules if name.rpartition(".")[2] in endings} == set(adapted)
    peft_config(lora, sorted(endings) if exact else adapted, base, inference=True).save_pretrained(str(directory))
    share_weights(directory, directory / "adapter_config.json")


def describe_no_export(context: ProcessContext, *, has_adapters: bool) -> str:
    """Return the message of an engine that has no adapters to export, or has a value head."""
    reason = "a value head needs a whole model; use export_hf" if has_adapters else "the option lora is unset"
    return f"{context}: there is no adapter to export: {reason}"


def check_alike(path: str, *, saved: bool, expected: bool) -> None:
    """Check that a checkpoint has adapters if the engine has, and has none otherwise.

    Raises:
        CheckpointError: only one of them has adapters.
    """
    if saved and not expected:
        raise CheckpointError(f"checkpoint {path!r} holds adapters: set the option lora as in the run that saved it")
    if expected and not saved:
        raise CheckpointError(f"checkpoint {path!r} holds a whole model and no adapters: leave the option lora unset")
