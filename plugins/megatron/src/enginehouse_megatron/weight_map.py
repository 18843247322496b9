"""Maps this rank's parameters to tensors of the Hugging Face checkpoint, and reads this rank's part of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes

from enginehouse.errors import ModelError
from enginehouse.weights.names import weight_files
from enginehouse_megatron.forms import Form, Heads, Whole
from enginehouse_megatron.output_layer import ValueHead
from enginehouse_torch.modeling.finite import check_stored
from enginehouse_torch.modeling.holding import VALUE_HEAD
from enginehouse_torch.modeling.ranks import Ranks

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

    from enginehouse_megatron.adapters import LayerAdapters
    from enginehouse_megatron.architectures import Architecture

LAYER_NUMBER = re.compile(r"(?<=decoder\.layers\.)\d+")
EXPERT_NUMBER = re.compile(r"(?<=\.mlp\.experts\.linear_fc[12]\.weight)\d+$")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of the checkpoint.

    Attributes:
        name: Name in the checkpoint.
        shape: Whole shape.
        split: Dimension by which tensor parallelism splits the tensor; None: every rank has the whole tensor.
        holder: Rank that holds the tensor of an expert, counted among the ranks that divide the experts; None: the
            tensor does not belong to an expert.
    """

    name: str
    shape: tuple[int, ...]
    split: int | None
    holder: int | None = None

    def find_region(self, rank: int, size: int) -> tuple[slice, ...]:
        """Return the part that rank `rank` of `size` ranks holds: a block, smaller for the last ranks if uneven."""
        whole = [slice(0, length) for length in self.shape]
        if self.split is not None:
            length = self.shape[self.split]
            block = -(-length // size)
            whole[self.split] = slice(min(rank * block, length), min((rank + 1) * block, length))
        return tuple(whole)


@dataclass(frozen=True, slots=True)
class MappedParameter:
    """This rank's part of a parameter, with its stored tensors and the `Form` that converts between the two.

    If the parameter has low-rank adapters, `named_parts` adds them to it.
    """

    parameter: torch.nn.Parameter
    form: Form
    stored: tuple[StoredTensor, ...]
    adapters: LayerAdapters | None = None

    def named_parts(self, heads: Heads, rank: int, size: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield this rank's part of each stored tensor by name, detached; a view of the parameter if possible."""
        for stored, part in zip(self.stored, self.form.separate(self.parameter.detach(), heads), strict=True):
            region = stored.find_region(rank, size)
            part = part[tuple(slice(0, place.stop - place.start) for place in region)]  # without padding
            yield stored.name, part if self.adapters is None else self.adapters.merge(stored.name, part)


class ModelFiles:
    """The safetensors files of a model directory, read by parts. Tensors in `made` replace tensors of the files."""

    def __init__(self, path: Path, made: Mapping[str, torch.Tensor]):
        from safetensors import safe_open

        self.path = path
        self._made = made
        opened = [safe_open(str(file), framework="pt") for file in weight_files(path)]
        self._file_of = {name: file for file in opened for name in file.keys()}  # noqa: SIM118

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the whole shape of a tensor; raises `ModelError` if there is no such tensor."""
        return tuple(self._made[name].shape if name in self._made else self._slice(name).get_shape())

    def read(self, name: str, region: Sequence[slice]) -> torch.Tensor:
        """Read only a part of a tensor."""
        part: torch.Tensor = (self._made[name] if name in self._made else self._slice(name))[tuple(region)]
        return part

    def _slice(self, name: str) -> Any:
        if name not in self._file_of:
            raise ModelError(f"the weights in {str(self.path)!r} lack {name}")
        return self._file_of[name].get_slice(name)


def map_parameters(
    model: GPTModel, architecture: Architecture, files: ModelFiles, *, copies: bool = False
) -> list[MappedParameter]:
    """Map each of this rank's parameters to its stored tensors; only with `copies` also a copy of a tied embedding.

    Raises:
        ModelError: The architecture does not map a parameter, or the checkpoint lacks a tensor.
    """
    weights = dict(architecture.weights)
    if isinstance(getattr(model, "output_layer", None), ValueHead):
        weights["output_layer.weight"] = Whole(f"{VALUE_HEAD}.weight", split=None)
    first = next((layer.layer_number - 1 for layer in model.decoder.layers), 0)
    group = parallel_state.get_expert_model_parallel_group()
    experts_each = (model.config.num_moe_experts or 0) // group.size()
    mapped = []
    for name, parameter in model.named_parameters():
        layer = _find_number(LAYER_NUMBER, name, first)
        expert = _find_number(EXPERT_NUMBER, name, group.rank() * experts_each)
        general = EXPERT_NUMBER.sub("{expert}", LAYER_NUMBER.sub("{layer}", name))
        if general not in weights:
            raise ModelError(
                f"megatron: the architecture does not say how {general!r} {tuple(parameter.shape)} is stored; add it "
                "to `weights` of its Architecture (enginehouse_megatron.architectures)"
            )
        form = weights[general]
        _mark_split(parameter, form, is_expert=expert is not None)
        if name == "output_layer.weight" and model.share_embeddings_and_output_weights:
            if not copies:
                continue  # the last stage's copy; the first has it
            form = weights["embedding.word_embeddings.weight"]
        names = [stored.format(layer=layer, expert=expert) for stored in form.stored]
        holder = None if expert is None else group.rank()
        stored = tuple(StoredTensor(name, files.shape(name), form.split, holder) for name in names)
        mapped.append(MappedParameter(parameter, form, stored))
    return mapped


def _find_number(pattern: re.Pattern[str], name: str, first: int) -> int | None:
    """Return the model-wide number of the layer or expert in a parameter's name; None if the name has no such number.

    Names count from 0 on each rank. `first` is the model-wide number of this rank's first layer or expert.
    """
    number = pattern.search(name)
    return None if number is None else first + int(number.group())


def _mark_split(parameter: torch.nn.Parameter, form: Form, *, is_expert: bool) -> None:
    """Mark a parameter whose parts are on different ranks, so that the norm of the gradients counts every part.

    megatron-core sets this mark when it initialises weights (layers.py:131, 250), but this engine reads the weights
    from files instead.

    The parameters of experts also get `allreduce=False`. megatron-core then sums their gradients over the ranks that
    hold the same experts, because each of these ranks has other tokens. megatron-core itself sets `allreduce=False`
    only if ranks divide the experts (transformer_engine.py:1551). This engine sets it in every layout, so that every
    checkpoint has the same two optimizers.
    """
    if is_expert:
        parameter.allreduce = False  # type: ignore[attr-defined]
    if (is_expert or form.split is not None) and not getattr(parameter, "tensor_model_parallel", False):
        set_tensor_model_parallel_attributes(parameter, True, form.split or 0, 1)


def load(mapped: Sequence[MappedParameter], files: ModelFiles, heads: Heads, rank: int, size: int) -> None:
    """Read the part of each weight that rank `rank` holds of the `size` ranks that split matrices.

    Rows of the vocabulary that stand for no token become 0.

    Raises:
        ModelError: A stored tensor has another shape than the model's config says, or is not finite.
    """
    with torch.no_grad():
        for entry in mapped:
            entry.parameter.copy_(read(entry, files, heads, rank, size, entry.parameter.dtype))


def read(
    entry: MappedParameter, files: ModelFiles, heads: Heads, rank: int, size: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return the value that the files give this rank's part of a parameter; raise as `load` does."""
    parts = {stored.name: files.read(stored.name, stored.find_region(rank, size)) for stored in entry.stored}
    check_stored(files.path, parts.items())
    whole = entry.form.join([part.to(dtype) for part in parts.values()], heads)
    shape = entry.parameter.shape
    if whole.dim() and whole.shape[0] < shape[0] and entry.form.split == 0 and len(parts) == 1:
        whole = torch.cat((whole, whole.new_zeros(shape[0] - whole.shape[0], *whole.shape[1:])))
    if whole.shape != shape:
        first = entry.stored[0]
        raise ModelError(
            f"{first.name} has the shape {first.shape}, which does not fit the model's config: "
            f"a rank's part would have the shape {tuple(whole.shape)}, not {tuple(shape)}"
        )
    return whole


def gather_stages(
    mapped: Sequence[MappedParameter], ranks: Ranks, pipeline: int, sharing: int
) -> list[list[StoredTensor]]:
    """Return the stored tensors of each of `pipeline` stages, in the order of each rank's own parameters; collective.

    The ranks of a stage are neighbours and have the same tensors, except that `sharing` neighbours divide the experts.
    """
    own = [astuple(stored) for entry in mapped for stored in entry.stored]
    of_ranks = [
        [StoredTensor(name, tuple(shape), *others) for name, shape, *others in of_rank] for of_rank in ranks.gather(own)
    ]
    ranks_per_stage = len(of_ranks) // pipeline
    stages = [of_ranks[first : first + sharing] for first in range(0, len(of_ranks), ranks_per_stage)]
    return [[stored for alike in zip(*stage, strict=True) for stored in dict.fromkeys(alike)] for stage in stages]
