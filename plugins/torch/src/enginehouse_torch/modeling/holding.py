"""Holding: the tensors of a model's directory that the model reads, and tensors that an export copies unchanged.

The model's class reads a stored tensor through the class's own mapping of names. A tensor that the class does not read
must belong to a part that the class does not compute (a prediction head, a vision tower, a further layer), else the
model is rejected. An export copies it unchanged. Tensors that the class reads but no text reaches are not trained, and
are copied unchanged too. `list_companions` lists the other files that an export copies. All training engines in torch
use this module.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from enginehouse.engines.model import TOKENIZER_FILES, ModelSpec
from enginehouse.engines.weights import ParamMeta
from enginehouse.errors import ModelError, listed
from enginehouse.weights.names import match_names, stored_names, stored_shapes, unique_state, weight_files
from enginehouse_torch.modeling.stored import StoredForm

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VALUE_HEAD = "score"
"""Name of the value head in the model and, as in transformers' `...ForSequenceClassification`, in a checkpoint."""
EARLIER_VALUE_HEAD = "value_head"
"""Name of the value head in checkpoints of earlier versions."""
HEADS = frozenset({f"{VALUE_HEAD}.weight", f"{EARLIER_VALUE_HEAD}.weight"})

COPIED = ("*.json", "*.jinja", "*.py", "*.txt", "LICENSE*", "NOTICE*", *TOKENIZER_FILES)
"""Files of a model's directory that an export copies. Files of `IN_FOLDERS` are also copied from subfolders."""
IN_FOLDERS = ("*.py", "*.jinja")
NOT_COPIED = ("config.json", "generation_config.json", "*.index.json", "adapter_config.json", "trainer_state.json")
"""Files that an export writes itself, and files of other weights."""


@dataclass(frozen=True, slots=True)
class Holding:
    """The tensors of a model's directory that the model reads, and tensors that an export copies unchanged.

    Attributes:
        path: the directory.
        form: names and parts of the model's tensors in its files.
        aside: tensors that the model does not read.
        untouched: names of tensors that the model reads but no text reaches.
        twins: additional stored names of a tied weight, by the name that the weight source yields.
        unreached: the model's own names of the `untouched` parameters.
    """

    path: Path
    form: StoredForm
    aside: tuple[ParamMeta, ...] = ()
    untouched: frozenset[str] = frozenset()
    twins: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unreached: frozenset[str] = frozenset()

    @classmethod
    def from_model(cls, model: PreTrainedModel, spec: ModelSpec, gone: Collection[str] = ()) -> Holding:
        """Compare a model's class, on any device and without adapters, with its directory.

        Args:
            gone: parameters that the model no longer has, because a value head replaced its own head.

        Raises:
            ModelError: a tensor is missing, or belongs to a model that the class does not compute, or the files hold
                two different tensors that the config ties.
        """
        path = Path(spec.path)
        stored = stored_names(path)
        read = match_names(model, stored)
        own = {name: target.name for name, target in read.items() if target.is_read}
        replaced = {name for name, target in read.items() if target.name in gone} | (HEADS - set(own))
        unread = stored - set(own) - replaced
        check_unread(unread, set(own), path, OF_A_CLASS, _unused_pattern(model))
        form = StoredForm.of(model, stored)
        tied: dict[str, str] = model.get_expanded_tied_weights_keys(all_submodels=True)
        return cls(
            path=path,
            form=form,
            aside=describe_tensors(path, unread),
            untouched=frozenset(part.name for name in find_unreached(model) for part in form.parts(name)) & stored,
            twins=_find_twins({name: stored for stored, name in own.items()}, tied, path),
            unreached=find_unreached(model),
        )

    @classmethod
    def from_names(
        cls, spec: ModelSpec, read: Set[str], tied: Mapping[str, str], gone: Set[str], whose: tuple[str, str]
    ) -> Holding:
        """Compare a directory with the names that an engine with its own models reads; raise as `from_model` does.

        Args:
            spec: the model.
            read: names of the stored tensors that the engine reads.
            tied: names of tied tensors, and for each the name of the tensor that replaces it.
            gone: names of tensors that a value head replaces.
            whose: the reader, and the advice for a tensor that it does not know, for messages.
        """
        path = Path(spec.path)
        stored = stored_names(path)
        unread = stored - read - set(tied) - gone - HEADS
        check_unread(unread, read, path, whose, BUFFERS)
        twins = _find_twins({name: name for name in stored}, tied, path)
        return cls(path=path, form=StoredForm({}), aside=describe_tensors(path, unread), twins=twins)

    def find_missing(self, model: PreTrainedModel) -> list[str]:
        """List the tensors that a model's parameters need and the directory does not hold."""
        stored = stored_names(self.path)
        state = unique_state(model, stored)
        own = [name for name, _ in model.named_parameters() if name in state and name != f"{VALUE_HEAD}.weight"]
        return sorted({part.name for name in own for part in self.form.parts(name)} - stored)

    def check_shapes(self, model: PreTrainedModel) -> None:
        """Check that the directory's tensors have the shapes that its config gives them.

        Raises:
            ModelError: a shape differs; the message names the first.
        """
        state = unique_state(model, stored_names(self.path))
        tensors = {name: tensor for name, tensor in state.items() if not name.startswith(VALUE_HEAD)}
        shapes = {
            part.name: tuple(part.cut(tensor).shape)
            for name, tensor in tensors.items()
            for part in self.form.parts(name)
        }
        for name, shape in stored_shapes(self.path).items():
            if name in shapes and shape != shapes[name]:
                raise ModelError(
                    f"the weights in '{self.path}' do not fit its config.json: {name} has the shape {shape}, but the "
                    f"config requires {shapes[name]}"
                )

    def describe_export(self, parameters: Iterable[ParamMeta]) -> Iterator[ParamMeta]:
        """Describe all tensors of an export in the order of `complete`, given the tensors of a weight source."""
        for meta in parameters:
            yield meta
            yield from (replace(meta, name=twin) for twin in self.twins.get(meta.name, ()))
        yield from self.aside

    def complete(self, weights: Iterable[tuple[str, torch.Tensor]], reads: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield all tensors of an export: the tensors of a weight source, and tensors copied from the directory.

        Args:
            weights: the tensors of a weight source.
            reads: False on a rank that writes nothing; it gets placeholders instead of tensors read from files.

        Raises:
            ModelError: the directory no longer holds a tensor that it held.
        """
        for name, tensor in weights:
            yield name, read_tensor(self.path, name) if reads and name in self.untouched else tensor
            yield from ((twin, tensor) for twin in self.twins.get(name, ()))
        for meta in self.aside:
            yield meta.name, read_tensor(self.path, meta.name) if reads else torch.empty(0)

    def notes(self) -> list[str]:
        """Describe the tensors that are not trained, one sentence each."""
        sentences = []
        if self.aside:
            summary = _summarize(meta.name for meta in self.aside)
            sentences.append(f"the model's class does not read {summary}: they are not trained, but exported unchanged")
        if self.untouched:
            sentences.append(
                f"no text reaches {_summarize(self.untouched)}: they are not trained, but exported unchanged"
            )
        return sentences


OF_A_CLASS = (
    "the model's class",
    "check what config.json says about these parts (biases, norms, quantization), or use the model's own code "
    "(model.trust_remote_code)",
)
BUFFERS = re.compile(r"rotary_emb\.inv_freq$|(^|\.)position_ids$")
"""Names of stored tensors that every class computes itself."""


def check_unread(
    unread: Set[str], read: Set[str], path: Path, whose: tuple[str, str], of_no_use: re.Pattern[str]
) -> None:
    """Reject unread tensors in a part of the model of which other tensors are read.

    A tensor in the same module as a read tensor (a bias), or in the same numbered block (a layer's norm), belongs to
    what the model computes. If it is not read, the loaded model is another model. A tensor in a separate block or head
    is allowed, and so is a tensor that no computation needs (pattern `of_no_use`). `whose` is the reader, and advice,
    for the message.

    Raises:
        ModelError: there are such tensors; the message names them.
    """
    parts = {part for name in read for part in _enclosing_parts(name)}
    inside = [name for name in unread if parts & set(_enclosing_parts(name)) and not of_no_use.search(name)]
    if inside:
        raise ModelError(
            f"the weights in {str(path)!r} hold {listed(sorted(inside))}, which {whose[0]} does not read, although it "
            f"reads the rest of these parts: without these tensors this would be another model; {whose[1]}"
        )


def _enclosing_parts(name: str) -> tuple[str, ...]:
    """Return the module and the outermost numbered block that a tensor belongs to."""
    module, _, _ = name.rpartition(".")
    numbered = re.match(r"(?:[^.]+\.)*?\d+(?=\.)", name)
    return (module,) if numbered is None else (module, numbered.group())


def _unused_pattern(model: PreTrainedModel) -> re.Pattern[str]:
    """Return the pattern of stored names that transformers' class ignores."""
    patterns = [*(model._keys_to_ignore_on_load_unexpected or ()), BUFFERS.pattern]
    return re.compile("|".join(f"({pattern})" for pattern in patterns))


def find_unreached(model: PreTrainedModel) -> frozenset[str]:
    """Return the names of the parameters that no text reaches: those outside the decoder, in a model that also takes
    images or sound."""
    if model.config.get_text_config() is model.config:
        return frozenset()
    parts = (model.get_decoder(), model.get_output_embeddings(), getattr(model, VALUE_HEAD, None))
    reached = {id(parameter) for part in parts if part is not None for parameter in part.parameters()}
    return frozenset(name for name, parameter in model.named_parameters() if id(parameter) not in reached)


def freeze(model: PreTrainedModel, names: Collection[str]) -> None:
    """Exclude parameters from training, so that no optimizer holds state for them."""
    for name in names:
        model.get_parameter(name).requires_grad_(False)


def _find_twins(stored_as: Mapping[str, str], tied: Mapping[str, str], path: Path) -> dict[str, tuple[str, ...]]:
    """Find tied weights that are stored under several names; `stored_as` maps names in the model to stored names.

    Returns:
        The additional stored names, by the stored name that a weight source yields.

    Raises:
        ModelError: the stored tensors differ.
    """
    twins: dict[str, tuple[str, ...]] = {}
    for further, first in tied.items():
        if further in stored_as and first in stored_as:
            name, twin = stored_as[first], stored_as[further]
            if not torch.equal(read_tensor(path, name), read_tensor(path, twin)):
                raise ModelError(
                    f"config.json in {str(path)!r} says tie_word_embeddings, so that {name} and {twin} are one weight, "
                    "but the files hold two different ones, and engines read such a model in different ways. Set "
                    "tie_word_embeddings to false in config.json, or remove the wrong tensor from the files"
                )
            twins[name] = (*twins.get(name, ()), twin)
    return twins


def read_tensor(path: Path, name: str) -> torch.Tensor:
    """Read one tensor of a model's directory.

    Raises:
        ModelError: no file holds it.
    """
    from safetensors import safe_open

    for file in weight_files(path):
        with safe_open(str(file), framework="pt") as tensors:
            if name in tensors.keys():  # noqa: SIM118 (safe_open has keys() only)
                return tensors.get_tensor(name)
    raise ModelError(f"the weights in {str(path)!r} lack {name}")


def describe_tensors(path: Path, names: Set[str]) -> tuple[ParamMeta, ...]:
    """Describe stored tensors by their files' headers, in the order of their names."""
    from safetensors import safe_open

    metadata = {}
    for file in weight_files(path) if names else ():
        with safe_open(str(file), framework="pt") as tensors:
            for name in names & set(tensors.keys()):
                part = tensors.get_slice(name)
                metadata[name] = ParamMeta(name, DTYPES[part.get_dtype()], tuple(part.get_shape()))
    return tuple(metadata[name] for name in sorted(metadata))


def has_other_dtype(path: Path, dtype: str) -> bool:
    """Return True if a directory stores floating-point tensors in another dtype than `dtype`, or may do so because its
    weights are not in safetensors files."""
    from safetensors import safe_open

    def differs(tensors: Any) -> bool:
        kinds = (DTYPES.get(tensors.get_slice(name).get_dtype(), "") for name in tensors.keys())  # noqa: SIM118
        return any("float" in kind and kind != dtype for kind in kinds)

    files = weight_files(path)
    for file in files:
        with safe_open(str(file), framework="pt") as tensors:
            if differs(tensors):
                return True
    return not files


DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip
"""torch's names of the dtypes of safetensors."""


def _summarize(names: Iterable[str]) -> str:
    """Summarize tensors by their names up to the first number: `36 tensors (mtp, model.visual)`."""
    names = list(names)
    prefixes = {
        re.split(r"\.\d+\.", name)[0] if re.search(r"\.\d+\.", name) else name.rpartition(".")[0] for name in names
    }
    noun = "tensor" if len(names) == 1 else "tensors"
    return f"{len(names)} {noun} ({listed(sorted(prefixes))})"


def list_companions(path: Path) -> list[Path]:
    """List the files beside weights and config that belong to a model, relative to the directory."""
    top = {file for pattern in COPIED for file in path.glob(pattern)}
    below = {file for pattern in IN_FOLDERS for file in path.glob(f"*/**/{pattern}")}
    files = (file.relative_to(path) for file in top | below if file.is_file())
    return sorted(
        file
        for file in files
        if not any(file.match(pattern) for pattern in NOT_COPIED if len(file.parts) == 1)
        and not any(part.startswith((".", "__")) and not part.endswith(".py") for part in file.parts)
    )
