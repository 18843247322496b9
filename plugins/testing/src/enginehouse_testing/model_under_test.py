"""The model for certificates and matrix runs: the suite's tiny models or a user's model, in a dtype."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from enginehouse.errors import UserError, nearest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from enginehouse.roles.role_plan import RolePlan

log = logging.getLogger(__name__)

Dtype = Literal["float32", "bfloat16"]

LAYERS_WITHOUT_INSTRUCTIONS = 4
"""Number of layers of a bfloat16 model to keep on a CPU without bfloat16 instructions, which is 5 to 8 times slower."""

MEAN_DIFFERENCES: Mapping[str, float] = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
"""Largest mean absolute difference, in nats, between logprobs of two engines that compute in one dtype."""

QUANTIZED_MEAN_DIFFERENCE = 0.5
"""As `MEAN_DIFFERENCES`, for a rollout engine that serves weights and activations in 8 bits: ten times as much as in
bfloat16, as measured (`enginehouse.weights.effect.QUANTIZED_TOLERANCE`)."""

PUBLISHED_KL = "published for GPUs in bfloat16: a KL of 0.0015 to 0.003 nats between engines (NeMo-RL)"


def mean_difference(rollout: RolePlan) -> float:
    """Return the largest mean absolute difference, in nats, between logprobs of a trainer and of a rollout."""
    return QUANTIZED_MEAN_DIFFERENCE if rollout.quantizes else MEAN_DIFFERENCES[rollout.model.dtype]


@dataclass(frozen=True, slots=True)
class ModelUnderTest:
    """The model that checks and runs use.

    Attributes:
        path: directory of the user's model; empty: the tiny models with random weights.
        dtype: dtype that engines compute in.
        title: the model's name in reports, with the number of layers that were kept.
        origin: source of the weights, if the directory names it.
    """

    path: str = ""
    dtype: Dtype = "float32"
    title: str = "tiny models"
    origin: str = ""

    @property
    def label(self) -> str:
        """Name in reports; empty for the tiny models in float32."""
        return "" if self == TINY else str(self)

    @property
    def described(self) -> str:
        """The name, and the source of the weights."""
        return f"{self.title}{self.origin and f' ({self.origin})'}"

    def __str__(self) -> str:
        return f"{self.described}, {self.dtype}"


def folder_of(label: str) -> str:
    """Turn a model's label into a folder name for the model's files."""
    return "-".join(re.findall(r"[\w.]+", re.sub(r" \(.*\)", "", label)))


TINY = ModelUnderTest()
"""The tiny models of the suite, in float32."""


def choose_model(model: str | None, dtype: Dtype | None = None, layers: int | None = None) -> ModelUnderTest:
    """Return the model that a command line names.

    Args:
        model: a directory, or the name of a model in the cache or on the hub; None: the tiny models.
        dtype: dtype that engines compute in; None: float32.
        layers: number of first layers to keep; None: all, or a few if this machine is slow in that dtype.

    Raises:
        UserError: there is no such model, or it has fewer layers.
    """
    from enginehouse_rl.hub.gguf import MADE_FROM
    from enginehouse_rl.plan.device import cpu_has_bfloat16, pick_device

    dtype = dtype or "float32"
    if model is None:
        if layers is not None:
            raise UserError("--layers keeps the first layers of a model: name the model by --model")
        return ModelUnderTest(dtype=dtype)
    path, title = _find(model)
    layer_count = _layers_of(path)
    if layers is not None and layers > layer_count:
        raise UserError(f"--layers must be at most {layer_count}, the layers of {path}, not {layers}")
    if layers is None:
        slow = dtype == "bfloat16" and pick_device("auto")[0] == "cpu" and not cpu_has_bfloat16()
        layers = min(layer_count, LAYERS_WITHOUT_INSTRUCTIONS) if slow else layer_count
    note = path / MADE_FROM  # written by `enginehouse recipes real-model`, and when a GGUF file is read
    origin = note.read_text(encoding="utf-8").strip() if note.is_file() else ""
    if layers == layer_count:
        return ModelUnderTest(str(path), dtype, title, origin)
    from enginehouse_testing.models import with_layers

    cut = f"first {layers} of {layer_count} layers"
    return ModelUnderTest(with_layers(str(path), layers), dtype, f"{title}, {cut}", origin)


def _find(model: str) -> tuple[Path, str]:
    """Return the directory and the report name of a model, given by path or by its name in the cache or on the hub. A
    GGUF file is first turned into a directory."""
    from enginehouse_rl.hub.gguf import find_gguf, make_model, models_folder
    from enginehouse_rl.hub.names import HubName

    path, cache = Path(model), models_folder("--model")
    for place in (path, cache / model):
        if (place / "config.json").is_file():
            return place.absolute(), place.name
    title = ""
    if name := HubName.parse(model, "model"):
        from enginehouse_rl.hub.snapshots import SHOWN, fetch_model

        snapshot = fetch_model(name, "--model")
        path, title = snapshot.model_path, f"{name.repository}@{snapshot.commit[:SHOWN]}"
        if not snapshot.file:
            return path, title
    if file := find_gguf(str(path), "--model"):
        return make_model(file, "--model", log.info).directory, title or file.name
    if path.exists():
        raise UserError(f"--model: {model} is not a directory of a Hugging Face model: it has no config.json")
    cached_names = [place.name for place in cache.iterdir()] if cache.is_dir() else []
    missing = f"--model: there is no directory {model}, and no model of that name in {cache}"
    raise UserError(f"{missing}. {nearest(model, cached_names)}. `enginehouse recipes real-model` makes one")


def _layers_of(path: Path) -> int:
    """Return the number of layers of a model."""
    from transformers import AutoConfig

    try:
        return int(AutoConfig.from_pretrained(path).get_text_config().num_hidden_layers)
    except (ValueError, AttributeError, OSError) as error:
        raise UserError(f"--model: the config of {path} cannot be read: {error}") from error
