"""Writing a model as a Hugging Face directory while no rank holds more of it than one file's part."""

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
from enginehouse.engines.model import end_ids
from enginehouse.errors import EnginehouseError
from enginehouse.weights.buckets import pack_buckets
from enginehouse.weights.names import INDEX, stored_names
from enginehouse_torch.modeling.holding import list_companions

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig

    from enginehouse.engines.model import ModelSpec
    from enginehouse.engines.weights import ParamMeta
    from enginehouse_torch.modeling.holding import Holding

__all__ = ["write_companions", "write_weights"]

FILE_BYTES = 5 << 30
"""Most weights in one file, a larger parameter excepted: what the Hugging Face hub uses."""


def write_weights(
    directory: Path,
    parameters: list[ParamMeta],
    weights: Iterator[tuple[str, torch.Tensor]],
    writes: bool,
    held: Holding | None = None,
) -> Exception | None:
    """Write safetensors files, and their index where there are several; remove weights of an earlier export.

    Args:
        directory: exists.
        parameters: all parameters, in the order of `weights`.
        weights: every whole parameter; exhausted on every rank, also where writing fails: gathering is collective.
        writes: False on ranks that only take part in gathering.
        held: what of the model's own directory is written again as it was; None: nothing.

    Returns:
        What kept this rank from writing; None: nothing.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    failure: Exception | None = None
    listed = parameters if held is None else list(held.beside(parameters))
    everything = weights if held is None else held.completed(weights, reads=writes)
    buckets = pack_buckets(listed, FILE_BYTES)
    files: dict[str, str] = {}
    total = 0
    for number, bucket in enumerate(buckets, start=1):
        file = "model.safetensors" if len(buckets) == 1 else f"model-{number:05}-of-{len(buckets):05}.safetensors"
        try:
            named = itertools.islice(everything, len(bucket))
            part = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in named if writes}
            if part:
                save_file(part, directory / file, {"format": "pt"})
        except (OSError, SafetensorError, EnginehouseError) as error:
            failure = error
            break
        files |= dict.fromkeys(part, file)
        total += sum(tensor.nbytes for tensor in part.values())
    for _ in weights:  # so that a gathering of all ranks ends
        pass
    if writes and failure is None:
        try:
            _complete(directory, files, total)
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
    """Write what belongs to a model beside its weights: all that the directory it came from has.

    The config is that directory's own, with the dtype of the weights that were written: whoever could read the one
    directory can read the other. Where weights of it were left out (an engine writes without `Holding`), it is the
    class's, which has no more than the class reads. A model with a value head is described as transformers'
    `...ForSequenceClassification` with one label.

    Args:
        directory: exists.
        config: the model's.
        generation: what is written where the directory has no generation config; None: the model cannot generate.
        dtype: of the weights that were written.
        architecture: name of the model's class in transformers, as a causal language model.
        spec: what the model was loaded from.
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
    """Say in a config, and in that of its text, in which dtype the weights are, under the name that it has for it."""
    key = "torch_dtype" if "torch_dtype" in settings else "dtype"
    settings[key] = dtype
    text = settings.get("text_config") or {}
    text.update({name: dtype for name in ("dtype", "torch_dtype") if name in text})


def share_weights(directory: Path, like: Path) -> None:
    """Let whoever may read a file beside them read the weights too: safetensors writes files for their owner alone."""
    for file in directory.glob("*.safetensors"):
        file.chmod(like.stat().st_mode)


def _classifier_settings(config: PreTrainedConfig, architecture: str) -> dict[str, Any]:
    """Return what a config says of one label; a class that transformers does not have is called as it would be."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

    kind = re.sub("(ForCausalLM|LMHeadModel|ForSequenceClassification)$", "", architecture)
    named = f"{kind}ForSequenceClassification"
    architectures = [MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(config.model_type, named)]
    return {"architectures": architectures, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}


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
    ends = {*ends, *text_ends(tokenizer)}
    special = [number for number, token in sorted(tokenizer.added_tokens_decoder.items()) if token.special]
    named = (tokenizer.pad_token_id, of_model, tokenizer.unk_token_id, tokenizer.bos_token_id)
    for number in (*named, *special):
        if number is not None and number not in ends:
            token: str | None = tokenizer.convert_ids_to_tokens(number)
            if token is not None and (number in named or not MEDIA_TOKEN.search(token)):
                return token
    return None


MEDIA_TOKEN = re.compile("image|video|audio|vision", re.IGNORECASE)
"""Names of tokens in whose place a model puts something else."""
