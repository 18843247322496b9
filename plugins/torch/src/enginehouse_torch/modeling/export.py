"""Writes a model as a Hugging Face directory, gathering the weights of one file at a time."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Iterator, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from enginehouse.data.templates import text_ends
from enginehouse.engines.model import ModelSpec, end_ids
from enginehouse.engines.weights import ParamMeta
from enginehouse.errors import EnginehouseError
from enginehouse.weights.buckets import pack_buckets
from enginehouse.weights.names import INDEX, stored_names
from enginehouse_torch.modeling.holding import Holding, list_companions

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig

__all__ = ["write_companions", "write_weights"]

FILE_BYTES = 5 << 30
"""Maximum bytes of weights in one file, unless a single parameter is larger; as on the Hugging Face hub."""


def write_weights(
    directory: Path,
    parameters: list[ParamMeta],
    weights: Iterator[tuple[str, torch.Tensor]],
    writes: bool,
    held: Holding | None = None,
) -> Exception | None:
    """Write safetensors files, and their index if there are several; remove weights of an earlier export.

    Args:
        directory: an existing directory.
        parameters: all parameters, in the order of `weights`.
        weights: every whole parameter; exhausted on every rank, even if writing fails, because gathering is collective.
        writes: False on ranks that only take part in gathering.
        held: tensors of the model's directory to copy unchanged; None: none.

    Returns:
        The error that kept this rank from writing, or None.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    failure: Exception | None = None
    described = parameters if held is None else list(held.describe_export(parameters))
    tensors = weights if held is None else held.complete(weights, reads=writes)
    buckets = pack_buckets(described, FILE_BYTES)
    files: dict[str, str] = {}
    total = 0
    for number, bucket in enumerate(buckets, start=1):
        file = "model.safetensors" if len(buckets) == 1 else f"model-{number:05}-of-{len(buckets):05}.safetensors"
        try:
            named = itertools.islice(tensors, len(bucket))
            contents = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in named if writes}
            if contents:
                save_file(contents, directory / file, {"format": "pt"})
        except (OSError, SafetensorError, EnginehouseError) as error:
            failure = error
            break
        files |= dict.fromkeys(contents, file)
        total += sum(tensor.nbytes for tensor in contents.values())
    for _ in weights:  # gathering is collective, so every rank exhausts the weights
        pass
    if writes and failure is None:
        try:
            _complete(directory, files, total)
        except OSError as error:
            failure = error
    return failure


def _complete(directory: Path, files: dict[str, str], total_bytes: int) -> None:
    """Write the index if there are several files, and remove other weight files of an earlier export.

    Transformers looks for a single file first, so it would read an old one instead of the new files.
    """
    current = set(files.values())
    if len(current) > 1:
        current.add(INDEX)
        index = {"metadata": {"total_size": total_bytes}, "weight_map": files}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    for pattern in ("model.safetensors", "model-*-of-*.safetensors", INDEX):
        for stale in directory.glob(pattern):
            if stale.name not in current:
                stale.unlink()


def write_companions(
    directory: Path,
    config: PreTrainedConfig,
    generation: GenerationConfig | None,
    dtype: torch.dtype,
    architecture: str,
    spec: ModelSpec,
) -> None:
    """Write everything beside a model's weights: copies of the files in its directory, and its configs.

    The written config is a copy of the config in the model's directory, with the dtype of the written weights, so that
    the same programs can read both. If some weights were left out (an engine writes without `Holding`), the
    config of the model's class is written, which describes only what the class reads. A model with a value head is
    described as transformers' `...ForSequenceClassification` with one label.

    Args:
        directory: an existing directory.
        config: the model's config.
        generation: written if the model's directory has no generation config; None: the model cannot generate.
        dtype: dtype of the written weights.
        architecture: name of the model's class in transformers, as a causal language model.
        spec: the description the model was loaded from.
    """
    source, is_value = Path(spec.path), spec.head == "value"
    for file in list_companions(source):
        (directory / file).parent.mkdir(exist_ok=True, parents=True)
        shutil.copyfile(source / file, directory / file)
    settings: dict[str, Any] = json.loads((source / "config.json").read_text(encoding="utf-8"))
    if not is_value and not stored_names(source) <= stored_names(directory):
        settings = {**config.to_diff_dict(), "architectures": [architecture]}
    settings["architectures"] = settings.get("architectures") or [architecture]
    _set_dtype(settings, str(dtype).removeprefix("torch."))
    own_generation = source / "generation_config.json"
    if is_value:
        settings |= _classifier_settings(config, architecture)
        settings.get("text_config", settings)["pad_token_id"] = _give_padding(directory, config, spec)
        (directory / own_generation.name).unlink(missing_ok=True)
    elif own_generation.is_file():
        shutil.copyfile(own_generation, directory / own_generation.name)
    elif generation is not None:
        generation.save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    share_weights(directory, directory / "config.json")


def _set_dtype(settings: dict[str, Any], dtype: str) -> None:
    """Set the dtype of a config, and of its text config, under the key that it uses."""
    key = "torch_dtype" if "torch_dtype" in settings else "dtype"
    settings[key] = dtype
    text = settings.get("text_config") or {}
    text.update({name: dtype for name in ("dtype", "torch_dtype") if name in text})


def share_weights(directory: Path, like: Path) -> None:
    """Give weights the permissions of the file `like`, because safetensors lets only the owner read its files."""
    for file in directory.glob("*.safetensors"):
        file.chmod(like.stat().st_mode)


def _classifier_settings(config: PreTrainedConfig, architecture: str) -> dict[str, Any]:
    """Return the config entries of a one-label classifier; if transformers lacks the class, guess its name."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

    prefix = re.sub("(ForCausalLM|LMHeadModel|ForSequenceClassification)$", "", architecture)
    default = f"{prefix}ForSequenceClassification"
    architectures = [MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(config.model_type, default)]
    return {"architectures": architectures, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}


def _give_padding(directory: Path, config: PreTrainedConfig, spec: ModelSpec) -> int | None:
    """Choose the padding token of a classifier's export, and name it in the exported tokenizer.

    Transformers reads the score at the last token that is not padding. If an end of sequence were padding, it would
    read the token before the end, so padding must be a token that ends no text.

    Returns:
        The token's id, or None if there is no such token, or no tokenizer to name it in. Transformers then reads the
        last token of a text, and rejects batches of several texts.
    """
    from transformers import AutoTokenizer

    text = config.get_text_config()
    ends = set(end_ids(getattr(text, "eos_token_id", None)))
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(spec.path, trust_remote_code=spec.trust_remote_code)
    except (OSError, ValueError):  # the model has no tokenizer
        pad_id = getattr(text, "pad_token_id", None)
        return None if pad_id in ends else pad_id
    padding = _padding(tokenizer, getattr(text, "pad_token_id", None), ends)
    if padding != tokenizer.pad_token:
        files = [directory / name for name in ("tokenizer_config.json", "special_tokens_map.json")]
        for file in files[:1] + [file for file in files[1:] if file.exists()]:
            settings = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
            settings["pad_token"] = padding
            file.write_text(json.dumps(settings, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    token_id: int | None = None if padding is None else tokenizer.convert_tokens_to_ids(padding)
    return token_id


def _padding(tokenizer: Any, model_padding: int | None, ends: Set[int]) -> str | None:
    """Return a token that ends no text: the padding of the tokenizer or of the model, or a special token; else None."""
    ends = {*ends, *text_ends(tokenizer)}
    special = [token_id for token_id, token in sorted(tokenizer.added_tokens_decoder.items()) if token.special]
    preferred = (tokenizer.pad_token_id, model_padding, tokenizer.unk_token_id, tokenizer.bos_token_id)
    for token_id in (*preferred, *special):
        if token_id is not None and token_id not in ends:
            token: str | None = tokenizer.convert_ids_to_tokens(token_id)
            if token is not None and (token_id in preferred or not MEDIA_TOKEN.search(token)):
                return token
    return None


MEDIA_TOKEN = re.compile("image|video|audio|vision", re.IGNORECASE)
"""Pattern of tokens that stand for something other than text."""
