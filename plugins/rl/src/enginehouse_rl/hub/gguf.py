"""Converts a GGUF file to a model directory in the user's cache, because engines read only safetensors.

transformers reads the file, and converts the weights to float32. If transformers does not read everything in a file,
the file is rejected, because the result would be another model. The directory is named by the digest of the file, so
that a copy under another name, or from the hub, is not converted again.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import math
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, redirect_stderr
from pathlib import Path
from typing import Any, NamedTuple

from enginehouse.atomic import move_into_place, staging_path
from enginehouse.errors import ModelError, first_line, listed
from enginehouse.jsontext import decode_json
from enginehouse.runtimes.store import cache_folder
from enginehouse_rl.hub.names import GGUF

OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
RECORD, MADE_FROM = "gguf.json", "made_from.txt"
"""Files in a converted directory that name its source, for programs and for people."""
READERS = ("torch", "transformers", "accelerate", "gguf")
"""The packages that read GGUF."""
SHOWN = 12
"""Number of digits of a digest in messages."""
_IDS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
ROTARY = "rope_freqs.weight"
"""The tensor of the divisors of rotary frequencies, which transformers ignores."""
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""RoPE parameters of the Llama 3 family, except the factor. A file contains only the divisors that follow from them."""
_LINK = f"model{GGUF}"
_STRETCHED = {"linear", "yarn", "longrope"}

Say = Callable[[str], object]


class GgufModel(NamedTuple):
    """A model directory that was converted from a GGUF file.

    Attributes:
        directory: the directory, with float32 weights in safetensors.
        digest: SHA-256 of the file.
        types: the types of its weights, beginning with the type of most weights, as `("Q4_1", "F32")`.
    """

    directory: Path
    file: Path
    digest: str
    types: tuple[str, ...]

    @property
    def words(self) -> str:
        """A description of the origin of the weights."""
        return f"GGUF of {', '.join(self.types)} (sha256 {self.digest[:SHOWN]}), dequantized to float32"


def find_gguf(path: str, key: str) -> Path | None:
    """Return the GGUF file that a model path names: the file itself, or the only weights of the directory; else None.

    Args:
        path: a file or a directory.
        key: the config key or option that has the path, for messages.

    Raises:
        ModelError: the directory contains several GGUF files, and no other weights.
    """
    place = Path(path)
    if place.is_file():
        return place if place.suffix.lower() == GGUF else None
    names = sorted(entry.name for entry in place.iterdir()) if place.is_dir() else []
    files = [name for name in names if name.lower().endswith(GGUF)]
    if not files or any(name.endswith(OTHER_WEIGHTS) for name in names):
        return None
    if len(files) > 1:
        raise ModelError(f"{key}: {path} contains several GGUF files; name one of them: {listed(files, 12)}")
    return place / files[0]


def models_folder(key: str) -> Path:
    """Return the folder of converted models in the user's cache.

    Args:
        key: the config key or option of a model, for messages.

    Raises:
        ModelError: there is no home directory, and no variable names a cache folder.
    """
    try:
        return cache_folder() / "models"
    except RuntimeError:
        raise ModelError(
            f"{key}: there is no home directory to keep models in; set XDG_CACHE_HOME to a folder"
        ) from None


def make_model(file: Path, key: str, say: Say) -> GgufModel:
    """Return the model directory of a GGUF file, converting the file first if needed.

    Args:
        key: the config key or option that has the file, for messages.
        say: gets a line about each task.

    Raises:
        ModelError: the file cannot be read as a model, or the directory cannot be written.
    """
    directory = models_folder(key)
    try:
        digest = _digest(file, say)
        directory /= f"gguf-{digest[:16]}"
        if not directory.exists():
            staging = staging_path(directory)
            try:
                write_model(file, staging, key, say, digest)
                move_into_place(staging, directory)
            finally:
                shutil.rmtree(staging, ignore_errors=True)
        record = decode_json((directory / RECORD).read_text(encoding="utf-8"))
    except OSError as error:
        place = error.filename or file
        raise ModelError(
            f"{key}: {file} cannot be converted to a model directory ({place}: {error.strerror or first_line(error)}); "
            "XDG_CACHE_HOME sets another folder for the directory"
        ) from error
    return GgufModel(directory, file, digest, tuple(record["types"]))


def write_model(file: Path, directory: Path, key: str, say: Say, digest: str = "") -> None:
    """Write the model directory of a GGUF file: its weights in float32, its tokenizer, and a record of its source.

    Args:
        directory: the directory, which must not exist.
        key: the config key or option that has the file, for messages.
        say: gets a line about each task.
        digest: SHA-256 of the file; empty: it is computed.

    Raises:
        ModelError: the file cannot be read as a model.
        OSError: the directory cannot be written.
    """
    if missing := find_missing_readers():
        raise ModelError(
            f"{key}: {file} is GGUF, and reading it needs {' and '.join(missing)}, which must be installed: pip "
            f"install {' '.join(missing)}"
        )
    header = _Header.read(file, key)
    say(f"Reading {file.name} and writing its weights as float32: {4 * header.weights / 2**30:.1f} GiB")
    _convert(header, directory, key)
    model = GgufModel(directory, file, digest or _digest(file, say), header.types)
    record = {"file": str(file.absolute()), "sha256": model.digest, "types": model.types, "dtype": "float32"}
    (directory / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    (directory / MADE_FROM).write_text(f"{file.name}: {model.words}\n", encoding="utf-8")


def find_missing_readers() -> list[str]:
    return [name for name in READERS if importlib.util.find_spec(name) is None]


_digests: dict[tuple[str, int, int], str] = {}


def _digest(file: Path, say: Say) -> str:
    """Return the SHA-256 of a file. A process reads a file only once, unless the file changes."""
    status = file.stat()
    cache_key = (str(file.resolve()), status.st_size, status.st_mtime_ns)
    if cache_key not in _digests:
        say(f"Reading {file.name} for its digest")
        with file.open("rb") as content:
            _digests[cache_key] = hashlib.file_digest(content, "sha256").hexdigest()
    return _digests[cache_key]


class _Header(NamedTuple):
    """Everything in a GGUF file except its weights.

    Attributes:
        tensors: the number of weights of each tensor, by name.
        types: the types of the weights, beginning with the type of most weights.
        fields: the values of its fields, except arrays.
        rotary: the divisors of its rotary frequencies; empty if these are not scaled.
    """

    file: Path
    tensors: Mapping[str, int]
    types: tuple[str, ...]
    tokens: int
    fields: Mapping[str, Any]
    rotary: tuple[float, ...] = ()

    @property
    def weights(self) -> int:
        return sum(self.tensors.values())

    @classmethod
    def read(cls, file: Path, key: str) -> _Header:
        """Read the header of a file, and check that the file is complete.

        Raises:
            ModelError: it is no GGUF file, is damaged or cut short, or is one of several parts.
        """
        from gguf import GGUFReader, GGUFValueType

        with file.open("rb") as content:
            first = content.read(64)
        if not first.startswith(b"GGUF"):
            is_pointer = first.startswith(b"version https://git-lfs")
            reason = (
                "but a pointer of Git LFS: run `git lfs pull`"
                if is_pointer
                else "because it does not begin with GGUF: fetch it again"
            )
            raise ModelError(f"{key}: {file} is no GGUF file, {reason}")
        try:
            reader = GGUFReader(file)
            scalars = [field for field in reader.fields.values() if field.types[:1] != [GGUFValueType.ARRAY]]
            fields = {field.name: field.contents() for field in scalars}
            tokens = reader.get_field("tokenizer.ggml.tokens")
        except Exception as error:  # of many kinds
            raise ModelError(
                f"{key}: {file} is damaged or cut short ({type(error).__name__}: {first_line(error)}): fetch it again"
            ) from error
        if (parts := fields.get("split.count", 1)) > 1:
            raise ModelError(
                f"{key}: {file} is one of {parts} parts, and transformers cannot read a file in parts: join them by "
                "llama-gguf-split --merge, and name the joined file"
            )
        counts: Counter[str] = Counter()
        for tensor in reader.tensors:
            counts[tensor.tensor_type.name] += int(tensor.n_elements)
        sizes = {tensor.name: int(tensor.n_elements) for tensor in reader.tensors}
        types = tuple(name for name, _ in counts.most_common())
        rotary = [tensor.data.tolist() for tensor in reader.tensors if tensor.name == ROTARY]
        return cls(file, sizes, types, len(tokens.data) if tokens else 0, fields, tuple(*rotary))


def _convert(header: _Header, directory: Path, key: str) -> None:
    """Write the weights, the config and the tokenizer of a file as a model directory.

    Raises:
        ModelError: transformers does not read the file, or not all of it.
        OSError: the directory cannot be written.
    """
    import torch
    import transformers
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    from enginehouse.quiet import quiet_transformers

    file, reads = header.file, f"transformers {transformers.__version__}"
    cure = "use the original model in safetensors"
    with ExitStack() as stack:
        stack.enter_context(quiet_transformers())
        nowhere = stack.enter_context(open(os.devnull, "w"))
        stack.enter_context(redirect_stderr(nowhere))  # hides progress bars, which nothing else switches off
        folder = stack.enter_context(tempfile.TemporaryDirectory())  # otherwise files beside it are also read
        Path(folder, _LINK).symlink_to(file.resolve())
        try:
            results: Any = AutoModelForCausalLM.from_pretrained(
                folder, gguf_file=_LINK, dtype=torch.float32, output_loading_info=True
            )
            loaded, report = results
            tokenizer = _read_tokenizer(folder, header.tokens)
        except MemoryError:
            raise
        except Exception as error:  # of many kinds
            raise ModelError(f"{key}: {reads} does not read {file}: {first_line(error)}; {cure}") from error
        for name, word in _IDS.items():
            if f"tokenizer.ggml.{word}_token_id" not in header.fields:  # otherwise the class's default stays
                setattr(loaded.config, name, None)
        if rope := _find_llama3_rope(header.rotary, loaded.config):
            loaded.config.rope_parameters = rope
        if hasattr(loaded.config, "quantization_config"):  # the weights are no longer quantized
            del loaded.config.quantization_config
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(loaded.config)  # the model that was read cannot be saved
        model.load_state_dict(loaded.state_dict(), assign=True)
        model.tie_weights()
        if lost := _name_lost(header, model, report["missing_keys"]):
            raise ModelError(
                f"{key}: {reads} does not read all of {file} ({lost}), so the result would be another model; {cure}"
            )
        try:
            model.save_pretrained(directory)
        except SafetensorError as error:  # a full disk
            raise OSError(errno.EIO, first_line(error), str(directory)) from error
        tokenizer.save_pretrained(directory)


def _name_lost(header: _Header, model: Any, missing: Any) -> str:
    """Name the part of a file that is missing in the model read from it; empty if the model is complete."""
    from enginehouse.weights.names import unique_state

    if missing:
        return f"it has no {listed(sorted(missing), 3)}"
    rope = f"{header.fields.get('general.architecture')}.rope.scaling.type"
    read_rope = (getattr(model.config, "rope_parameters", None) or {}).get("rope_type", "default")
    if header.fields.get(rope) in _STRETCHED and read_rope == "default":
        return f"{rope}: {header.fields[rope]}"
    tensors = {name: size for name, size in header.tensors.items() if not _is_beyond(name, model.config)}
    if model.config.tie_word_embeddings:
        tensors.pop("output.weight", None)
    if _find_llama3_rope(header.rotary, model.config):
        del tensors[ROTARY]
    loaded, stored = sum(tensor.numel() for tensor in unique_state(model).values()), sum(tensors.values())
    if loaded == stored:
        return ""
    ropes = [name for name in tensors if name.startswith("rope_")]
    return f"tensor {ropes[0]}" if ropes else f"{loaded} of {stored} weights"


def _find_llama3_rope(divisors: Sequence[float], config: Any) -> dict[str, Any]:
    """Return the Llama 3 RoPE parameters that give these divisors of frequencies; empty if no such parameters do."""
    rope = getattr(config, "rope_parameters", None) or {}
    if not divisors or len(divisors) * 2 != getattr(config, "head_dim", None):
        return {}
    low, high, original = _LLAMA3.values()
    factor = max(divisors)
    for number, divisor in enumerate(divisors):
        turns = original / (2 * math.pi * rope["rope_theta"] ** (2 * number / config.head_dim))
        share = min(max((turns - low) / (high - low), 0.0), 1.0)
        if not math.isclose(divisor, 1 / ((1 - share) / factor + share), rel_tol=1e-4):
            return {}
    return {**rope, "rope_type": "llama3", "factor": factor, **_LLAMA3}


def _is_beyond(name: str, config: Any) -> bool:
    """True if a tensor belongs to an extra block that follows a model's layers and only predicts further tokens."""
    block = re.match(r"blk\.(\d+)\.", name)
    return block is not None and int(block[1]) >= config.get_text_config().num_hidden_layers


def _read_tokenizer(folder: str, tokens: int) -> Any:
    """Return the tokenizer of the file in a folder, with exactly the file's tokens.

    The tokenizer that transformers returns also has the tokens that its tokenizer class expects, and it would be saved
    with the rules of that class. Therefore this function builds a tokenizer of a general class.

    Args:
        tokens: the number of tokens in the file.
    """
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    loaded = AutoTokenizer.from_pretrained(folder, gguf_file=_LINK)
    content = decode_json(loaded.backend_tokenizer.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < tokens]
    backend = Tokenizer.from_str(json.dumps(content))
    roles = {name: getattr(loaded, name) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
    special_tokens = {name: token for name, token in roles.items() if token and backend.token_to_id(token) is not None}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **special_tokens)
    tokenizer.chat_template = loaded.chat_template
    return tokenizer
