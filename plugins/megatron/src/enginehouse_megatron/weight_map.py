"""Which tensors of the Hugging Face checkpoint this rank's parameters are made of, and which part of each it has."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from enginehouse_megatron import kernels  # noqa: F401  before all else of megatron-core

# isort: split
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes

from enginehouse.errors import ModelError
from enginehouse.weights.names import weight_files
from enginehouse_megatron.forms import Form, Heads, Whole
from enginehouse_megatron.output_layer import ValueHead
from enginehouse_torch.modeling.finite import check_stored
from enginehouse_torch.modeling.holding import VALUE_HEAD

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

    from enginehouse_megatron.architectures import Architecture

LAYER_NUMBER = re.compile(r"(?<=decoder\.layers\.)\d+")
EXPERT_NUMBER = re.compile(r"(?<=\.mlp\.experts\.linear_fc[12]\.weight)\d+$")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of the checkpoint.

    Attributes:
        name: its name.
        shape: its whole shape.
        split: by which dimension tensor parallelism splits it; None: every rank has the whole.
        holder: which of the ranks that share out experts has this one; None: it is of no expert, and all have it.
    """

    name: str
    shape: tuple[int, ...]
    split: int | None
    holder: int | None = None

    def region(self, rank: int, size: int) -> tuple[slice, ...]:
        """The part that rank `rank` of `size` has: blocks, the last ones smaller where they do not divide."""
        whole = [slice(0, length) for length in self.shape]
        if self.split is not None:
            length = self.shape[self.split]
            block = -(-length // size)
            whole[self.split] = slice(min(rank * block, length), min((rank + 1) * block, length))
        return tuple(whole)


@dataclass(frozen=True, slots=True)
class MappedParameter:
    """One of this rank's parameters.

    Attributes:
        parameter: this rank's part of it.
        form: how it is made of stored tensors.
        stored: these.
    """

    parameter: torch.nn.Parameter
    form: Form
    stored: tuple[StoredTensor, ...]

    def parts(self, heads: Heads, rank: int, size: int) -> list[torch.Tensor]:
        """This rank's parts of the stored tensors, detached: views of the parameter where that can be."""
        found = []
        for stored, part in zip(self.stored, self.form.apart(self.parameter.detach(), heads), strict=True):
            region = stored.region(rank, size)
            found.append(part[tuple(slice(0, place.stop - place.start) for place in region)])  # without padding
        return found


class ModelFiles:
    """The safetensors files of a model directory, read by parts.

    Args:
        path: the model's directory.
        made: tensors that it need not hold, by name.

    Attributes:
        path: the directory.
    """

    def __init__(self, path: Path, made: Mapping[str, torch.Tensor]):
        from safetensors import safe_open

        self.path = path
        self._made = made
        files = weight_files(path)
        self._opened = [safe_open(str(file), framework="pt") for file in files]
        self._file_of = {name: file for file in self._opened for name in file.keys()}  # noqa: SIM118

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole shape of a tensor.

        Raises:
            ModelError: there is no such tensor.
        """
        if name in self._made:
            return tuple(self._made[name].shape)
        return tuple(self._slice(name).get_shape())

    def read(self, name: str, region: Sequence[slice]) -> torch.Tensor:
        """A part of a tensor; no more of it is read."""
        part: torch.Tensor = (self._made[name] if name in self._made else self._slice(name))[tuple(region)]
        return part

    def _slice(self, name: str) -> Any:
        if name not in self._file_of:
            raise ModelError(f"the weights in {str(self.path)!r} lack {name}")
        return self._file_of[name].get_slice(name)


def map_parameters(model: GPTModel, architecture: Architecture, files: ModelFiles) -> list[MappedParameter]:
    """Find what each of this rank's parameters is stored as; a copy of a tied embedding is left out.

    Raises:
        ModelError: the architecture does not say how a parameter is stored, or the checkpoint lacks a tensor.
    """
    weights = dict(architecture.weights)
    if isinstance(getattr(model, "output_layer", None), ValueHead):
        weights["output_layer.weight"] = Whole(f"{VALUE_HEAD}.weight", split=None)
    first = next((layer.layer_number - 1 for layer in model.decoder.layers), 0)
    group = parallel_state.get_expert_model_parallel_group()
    experts_each = (model.config.num_moe_experts or 0) // group.size()
    found = []
    for name, parameter in model.named_parameters():
        layer = _number(LAYER_NUMBER, name, first)
        expert = _number(EXPERT_NUMBER, name, group.rank() * experts_each)
        general = EXPERT_NUMBER.sub("{expert}", LAYER_NUMBER.sub("{layer}", name))
        if general not in weights:
            raise ModelError(
                f"megatron: the architecture does not say how {general!r} {tuple(parameter.shape)} is stored; add it "
                "to `weights` of its Architecture (enginehouse_megatron.architectures)"
            )
        form = weights[general]
        _mark_split(parameter, form, is_expert=expert is not None)
        if name == "output_layer.weight" and model.share_embeddings_and_output_weights:
            continue  # the last stage's copy; the first has it
        names = [stored.format(layer=layer, expert=expert) for stored in form.stored]
        holder = None if expert is None else group.rank()
        stored = tuple(StoredTensor(name, files.shape(name), form.split, holder) for name in names)
        found.append(MappedParameter(parameter, form, stored))
    return found


def _number(pattern: re.Pattern[str], name: str, first: int) -> int | None:
    """Which of all it is, where a name counts from this rank's first."""
    number = pattern.search(name)
    return None if number is None else first + int(number.group())


def _mark_split(parameter: torch.nn.Parameter, form: Form, *, is_expert: bool) -> None:
    """Say of a parameter that each rank has another part of it, so that a norm counts them all.

    megatron-core does where it draws first values (layers.py:131, 250), and here none are drawn. An expert's counts
    the tokens of every rank, those that split matrices as well, and its gradient is summed over all that hold it:
    megatron-core sees to that with `allreduce=False`, which it says only where experts are shared out
    (transformer_engine.py:1551). Said always, a checkpoint has the same two optimizers in every layout.
    """
    if is_expert:
        parameter.allreduce = False  # type: ignore[attr-defined]
    if (is_expert or form.split is not None) and not getattr(parameter, "tensor_model_parallel", False):
        set_tensor_model_parallel_attributes(parameter, True, form.split or 0, 1)


def load(mapped: Sequence[MappedParameter], files: ModelFiles, heads: Heads, rank: int, size: int) -> None:
    """Read this rank's part of each weight into its parameter; rows that no token has are 0.

    Args:
        mapped: this rank's parameters.
        files: what is read.
        heads: sizes of the attention.
        rank: of those that split matrices.
        size: how many there are.

    Raises:
        ModelError: a stored tensor has another shape than the model's config says, or is not finite.
    """
    with torch.no_grad():
        for one in mapped:
            parts = [files.read(stored.name, stored.region(rank, size)) for stored in one.stored]
            check_stored(files.path, zip((stored.name for stored in one.stored), parts, strict=True))
            whole = one.form.together([part.to(one.parameter.dtype) for part in parts], heads)
            kept = one.parameter
            if whole.dim() and whole.shape[0] < kept.shape[0] and one.form.split == 0 and len(parts) == 1:
                kept[whole.shape[0] :].zero_()
                kept = kept[: whole.shape[0]]
            if whole.shape != kept.shape:
                raise ModelError(
                    f"{one.stored[0].name} has the shape {one.stored[0].shape}, which does not fit the model's config: "
                    f"a rank's part would have the shape {tuple(whole.shape)}, not {tuple(kept.shape)}"
                )
            kept.copy_(whole)


def stored_tensors(mapped: Sequence[MappedParameter]) -> Iterator[StoredTensor]:
    """The stored tensors of parameters, in their order."""
    for one in mapped:
        yield from one.stored


def of_stage(of_ranks: Sequence[Sequence[StoredTensor]]) -> list[StoredTensor]:
    """All stored tensors of a stage, those that several ranks have once; in every rank's own order.

    Args:
        of_ranks: those of each of the ranks that share out the experts; the same but for these.
    """
    return [one for alike in zip(*of_ranks, strict=True) for one in dict.fromkeys(alike)]
