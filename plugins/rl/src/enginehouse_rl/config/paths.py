"""Checks that the model directory of a config contains a model, and that a run may use its run directory."""

from __future__ import annotations

import difflib
import fnmatch
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from enginehouse.engines.model import TOKENIZER_FILES
from enginehouse.errors import ConfigError, ModelError, describe_os_error
from enginehouse.jsontext import decode_json
from enginehouse.weights.names import stored_shapes
from enginehouse_rl.checkpoints import list_checkpoints
from enginehouse_rl.config.earlier_run import RUN_MARKER, can_resume, describe_outcome
from enginehouse_rl.config.run_lock import LOCK_FILE, check_free

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def read_model(path: str, key: str = "model.path") -> Mapping[str, Any]:
    """Check that `path` is a Hugging Face model directory, and return its `config.json`.

    Args:
        path: a directory, relative to the current directory.

    Raises:
        ModelError: `path` is not a directory, lacks `config.json`, safetensors weights or a tokenizer (the message
            lists everything that is missing), or has a damaged file of weights.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise ModelError(f"{key}: {_explain_no_directory(path)}")
    files = {entry.name for entry in directory.iterdir()}
    config: Mapping[str, Any] = {}
    missing: list[str] = []
    if "config.json" in files:
        config = _read_json(directory / "config.json", key)
    else:
        missing.append("config.json")
    if weights := _name_missing_weights(directory, files, key):
        missing.append(weights)
    if not any(fnmatch.filter(files, pattern) for pattern in TOKENIZER_FILES):
        missing.append("a tokenizer (tokenizer.json)")
    if missing and RUN_MARKER in files and (directory / "model").is_dir():
        raise ModelError(f"{key}: {path} is a run directory; its newest model is {directory / 'model'}")
    if missing and "adapter_config.json" in files:
        base = _read_json(directory / "adapter_config.json", key).get("base_model_name_or_path")
        raise ModelError(
            f"{key} must be a full model, but {path} is an adapter of {base}: merge it with peft (merge_and_unload, "
            "save_pretrained), or train with train.export=both"
        )
    if missing:
        raise ModelError(
            f"{key}: {path} is not a Hugging Face model directory; missing: {', '.join(missing)}. "
            f"It holds: {', '.join(sorted(files)[:12]) or 'nothing'}"
        )
    try:
        stored_shapes(directory)
    except ModelError as error:
        raise ModelError(f"{key}: {error}") from error
    return config


def has_chat_template(path: str) -> bool:
    """True if the model's directory contains a chat template."""
    directory = Path(path)
    if any(directory.glob("chat_template.*")) or (directory / "chat_templates").is_dir():
        return True
    try:
        return bool(decode_json((directory / "tokenizer_config.json").read_text(encoding="utf-8")).get("chat_template"))
    except (OSError, ValueError, AttributeError):
        return False


class EarlierRun(ConfigError):
    """The run directory contains an earlier run that must not be deleted."""


def check_run_directory(
    path: str | Path,
    *,
    overwrite: bool,
    spare_unfinished: bool = False,
    needed: Mapping[str, str] | None = None,
    resuming: bool = False,
) -> str | None:
    """Check that a run may write to `path`. Nothing is deleted here.

    Args:
        overwrite: true if an earlier run in the directory may be deleted.
        spare_unfinished: true if an unfinished run with checkpoints must not be deleted.
        needed: the paths that the run reads, by their config keys; none may be deleted.
        resuming: true if the run resumes the earlier run, so that nothing is deleted.

    Returns:
        A description of the earlier run that would be deleted; None if there is none.

    Raises:
        EarlierRun: the directory contains an earlier run that may not be deleted.
        ConfigError: the directory has other content, contains a running run, or cannot be written to.
    """
    path = Path(path).absolute()
    if not path.exists():
        parent = next(above for above in path.parents if above.exists())
        if not parent.is_dir():
            raise ConfigError(f"run.directory: cannot create {path}, because {parent} is a file")
        _check_writable(parent, f"run.directory: cannot create {path}, because {parent} is not writable")
        return None
    if not path.is_dir():
        raise ConfigError(f"run.directory must be a directory, but {path} is a file")
    _check_writable(path, f"run.directory: {path} is not writable")
    check_free(path)
    content = sorted(entry.name for entry in path.iterdir() if entry.name != LOCK_FILE)
    if content and RUN_MARKER not in content:
        raise ConfigError(
            f"run.directory: {path} is not empty and was not made by a run (it has no {RUN_MARKER}; it holds "
            f"{', '.join(content[:8])}). It is never deleted: name another directory"
        )
    if resuming or not content:
        return None
    choices = "Choose another directory (run.directory=...), "
    choices += "continue that run with --resume, " if list_checkpoints(path) else ""
    if not overwrite:
        raise EarlierRun(f"run.directory: {path} already contains a run. {choices}or delete it with run.overwrite=true")
    outcome = describe_outcome(path)
    if spare_unfinished and can_resume(path):
        raise EarlierRun(
            f"run.overwrite: {path} contains an unfinished run ({outcome}). Because this run has checkpoints, "
            f"run.overwrite in the config file does not delete it. {choices}or delete it with run.overwrite=true on "
            "the command line"
        )
    _check_outside(path, {"the current directory": str(Path.cwd()), **(needed or {})})
    return f"the run in {path}: {outcome}"


def _check_outside(directory: Path, needed: Mapping[str, str]) -> None:
    """Refuse to delete a directory that contains a path of `needed`."""
    for key, path in needed.items():
        if Path(path).resolve().is_relative_to(directory.resolve()):
            raise ConfigError(f"run.overwrite: {key} ({path}) is inside {directory} and would be deleted with it")


def _check_writable(directory: Path, refusal: str) -> None:
    """Raise an error if no directory can be created in `directory`. To find out, create and remove one: permissions do
    not always show whether this is possible, for example in /proc."""
    try:
        Path(tempfile.mkdtemp(prefix=".enginehouse-", dir=directory)).rmdir()
    except OSError as error:
        raise ConfigError(f"{refusal} ({error.strerror})") from error


def _explain_no_directory(path: str) -> str:
    """Return the reason why `path` is no directory, and suggest the directory with the nearest name."""
    directory = Path(path)
    if directory.exists():
        return f"{path} must be a model directory, but is a file"
    if directory.is_symlink():
        return (
            f"{path} is a broken link: {os.readlink(directory)} does not exist. `model` in a run directory is a link "
            "to the newest model in models/: copy the model itself with cp -rL"
        )
    reason = f"{path} does not exist (relative paths start at the current directory, {Path.cwd()})"
    parent = directory.parent
    entries = list(parent.iterdir()) if parent.is_dir() else []
    siblings = [entry.name for entry in entries if entry.is_dir() or entry.suffix.lower() == ".gguf"]
    close = difflib.get_close_matches(directory.name, siblings, n=1)
    if close:
        return f"{reason}. Did you mean {parent / close[0]}?"
    if _HUB_ID.fullmatch(path) and parent.is_dir():
        return (
            f"{reason}. Because {parent} is a directory here, the path is not taken as a name on the Hugging Face "
            f"hub; for the hub, write {path}@main"
        )
    if _HUB_ID.fullmatch(path):
        return (
            f"{reason}. If it is a model of the Hugging Face hub, download it first: "
            f"hf download {path} --local-dir models/{directory.name}, and set the path to that directory"
        )
    return reason


def _name_missing_weights(directory: Path, files: set[str], key: str) -> str:
    """Name the missing weight files; empty if none is missing."""
    if "model.safetensors.index.json" in files:
        index = _read_json(directory / "model.safetensors.index.json", key)
        shards = sorted(set(index.get("weight_map", {}).values()) - files)
        return f"weights {', '.join(shards[:5])} (named in model.safetensors.index.json)" if shards else ""
    if any(name.endswith(".safetensors") for name in files):
        return ""
    if any(name.endswith(".bin") for name in files):
        return "weights in safetensors (it has .bin files: load and save it with transformers to convert them)"
    return "weights (model.safetensors)"


def _read_json(path: Path, key: str) -> dict[str, Any]:
    try:
        content = decode_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{key}: {path} cannot be read: {describe_os_error(error)}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{key}: {path} must hold a JSON object")
    return content
