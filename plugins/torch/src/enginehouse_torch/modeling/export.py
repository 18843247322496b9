"""Writing a model as a Hugging Face directory while no rank holds more of it than one file's part."""

from __future__ import annotations

import contextlib
import copy
import json
import re
import shutil
from collections.abc import Iterator, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from enginehouse.engines.model import TOKENIZER_COMPANIONS, TOKENIZER_FILES, end_ids
from enginehouse.weights.buckets import pack_buckets

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig

    from enginehouse.engines.model import ModelSpec
    from enginehouse.engines.weights import ParamMeta

__all__ = ["write_companions", "write_weights"]

INDEX = "model.safetensors.index.json"
FILE_BYTES = 5 << 30
"""Most weights in one file, a larger parameter excepted: what the Hugging Face hub uses."""


def write_weights(
    directory: Path, parameters: list[ParamMeta], weights: Iterator[tuple[str, torch.Tensor]], writes: bool
) -> Exception | None:
    """Write safetensors files, and their index where there are several; remove weights of an earlier export.

    Args:
        directory: exists.
        parameters: all parameters, in the order of `weights`.
        weights: every whole parameter; exhausted on every rank, also where writing fails: gathering is collective.
        writes: False on ranks that only take part in gathering.

    Returns:
        What kept this rank from writing; None: nothing.
    """
    from safetensors.torch import save_file

    failure: Exception | None = None
    buckets = pack_buckets(parameters, FILE_BYTES)
    files: dict[str, str] = {}
    for number, bucket in enumerate(buckets, start=1):
        part = {}
        for _ in bucket:
            name, tensor = next(weights)
            if writes and failure is None:
                part[name] = tensor.detach().cpu().contiguous().clone()
        file = "model.safetensors" if len(buckets) == 1 else f"model-{number:05}-of-{len(buckets):05}.safetensors"
        files |= dict.fromkeys(part, file)
        if part:
            try:
                save_file(part, directory / file, {"format": "pt"})
            except Exception as error:
                failure = error
    for _ in weights:  # so that a gathering of all ranks ends
        pass
    if writes and failure is None:
        try:
            _complete(directory, files, sum(meta.nbytes for meta in parameters))
        except OSError as error:
            failure = error
    return failure


def _complete(directory: Path, files: dict[str, str], total_bytes: int) -> None:
    """Write the index where there are several files, and remove those of an export that was cut otherwise.

    One of these would be read in place of the new ones: transformers looks for a single file first.
    """
    kept = set(files.values())
    if len(kept) > 1:
        kept.add(INDEX)
        index = {"metadata": {"total_size": total_bytes}, "weight_map": files}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    for pattern in ("model.safetensors", "model-*-of-*.safetensors", INDEX):
        for stale in directory.glob(pattern):
            if stale.name not in kept:
                stale.unlink()


def write_companions(
    directory: Path,
    config: PreTrainedConfig,
    generation: GenerationConfig | None,
    dtype: torch.dtype,
    architecture: str,
    spec: ModelSpec,
) -> None:
    """Write config and generation config, and copy the tokenizer of the directory the model came from.

    A model with a value head is described as transformers' `...ForSequenceClassification` with one label.

    Args:
        directory: exists.
        config: the model's; it is told `dtype` and `architecture`.
        generation: None: the model cannot generate, or has none.
        dtype: of the weights that were written.
        architecture: name of the model's class in transformers, as a causal language model.
        spec: what the model was loaded from.
    """
    config.dtype = dtype
    config.architectures = [architecture]
    _copy_tokenizer(Path(spec.path), directory)
    if spec.head == "value":
        config, generation = _as_sequence_classifier(config, architecture), None
        config.get_text_config().pad_token_id = _give_padding(directory, config, spec)
    config.save_pretrained(directory)
    share_weights(directory, directory / "config.json")
    if generation is not None:
        generation.save_pretrained(directory)
    else:
        (directory / "generation_config.json").unlink(missing_ok=True)


def share_weights(directory: Path, like: Path) -> None:
    """Let whoever may read a file beside them read the weights too: safetensors writes files for their owner alone."""
    for file in directory.glob("*.safetensors"):
        file.chmod(like.stat().st_mode)


def _as_sequence_classifier(config: PreTrainedConfig, architecture: str) -> PreTrainedConfig:
    """A config with one label; a class that transformers does not have is called as it would be."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

    config = copy.deepcopy(config)
    kind = re.sub("(ForCausalLM|LMHeadModel|ForSequenceClassification)$", "", architecture)
    named = f"{kind}ForSequenceClassification"
    config.architectures = [MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(config.model_type, named)]
    config.num_labels = 1
    return config


def _give_padding(directory: Path, config: PreTrainedConfig, spec: ModelSpec) -> int | None:
    """Choose the padding token of a classifier's export, and name it in the tokenizer that lies there.

    Transformers reads the score at the last token that is not padding. So padding is a token that ends no text: with
    an end of sequence as padding it would read the token before it.

    Returns:
        The token's id. None where there is none, or no tokenizer to name it: transformers then reads the last token of
        a text, and refuses several texts at once.
    """
    from transformers import AutoTokenizer

    text = config.get_text_config()
    ends = set(end_ids(getattr(text, "eos_token_id", None)))
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(spec.path, trust_remote_code=spec.trust_remote_code)
    except (OSError, ValueError):  # it has none
        own = getattr(text, "pad_token_id", None)
        return None if own in ends else own
    padding = _padding(tokenizer, getattr(text, "pad_token_id", None), ends)
    if padding != tokenizer.pad_token:
        named = [directory / name for name in ("tokenizer_config.json", "special_tokens_map.json")]
        for file in named[:1] + [file for file in named[1:] if file.exists()]:
            settings = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
            settings["pad_token"] = padding
            file.write_text(json.dumps(settings, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    number: int | None = None if padding is None else tokenizer.convert_tokens_to_ids(padding)
    return number


def _padding(tokenizer: Any, of_model: int | None, ends: Set[int]) -> str | None:
    """Return a token that ends no text: the tokenizer's padding, else the model's, else a special token; None: none."""
    ends = {*ends, tokenizer.eos_token_id}
    if tokenizer.chat_template:
        with contextlib.suppress(Exception):  # templates raise what they like
            chat = [{"role": role, "content": "."} for role in ("user", "assistant")]
            ends.update(tokenizer.apply_chat_template(chat, return_dict=False)[-1:])
    special = [number for number, token in sorted(tokenizer.added_tokens_decoder.items()) if token.special]
    named = (tokenizer.pad_token_id, of_model, tokenizer.unk_token_id, tokenizer.bos_token_id)
    for number in (*named, *special):
        if number is not None and number not in ends:
            token: str | None = tokenizer.convert_ids_to_tokens(number)
            if token is not None and (number in named or not _OF_MEDIA.search(token)):
                return token
    return None


_OF_MEDIA = re.compile("image|video|audio|vision", re.IGNORECASE)
"""Names of tokens in whose place a model puts something else."""


def _copy_tokenizer(source: Path, directory: Path) -> None:
    """Copy the files of a model directory's tokenizer to another directory."""
    for pattern in (*TOKENIZER_FILES, *TOKENIZER_COMPANIONS):
        for file in filter(Path.is_file, source.glob(pattern)):
            shutil.copyfile(file, directory / file.name)
