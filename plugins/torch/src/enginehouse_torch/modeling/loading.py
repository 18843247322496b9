"""Loading a Hugging Face causal language model from a directory; shared by the training and the rollout engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from enginehouse.engines.model import ModelSpec
from enginehouse.errors import ModelError, listed
from enginehouse.quiet import quiet_transformers
from enginehouse_torch.modeling.finite import check_stored
from enginehouse_torch.modeling.memory import is_out_of_memory

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
VALUE_HEAD = "value_head"
"""Name of the value head in the model; its weight `value_head.weight` in a checkpoint has shape `(1, hidden)`."""


def load_model(spec: ModelSpec, device: torch.device | str) -> PreTrainedModel:
    """Load the model of `spec` onto `device`, in evaluation mode (no dropout), every weight from the checkpoint.

    With `spec.head == "value"` the model has a further submodule `value_head`, a `torch.nn.Linear(hidden, 1)`
    without bias: from the checkpoint if that has `value_head.weight`, else drawn with `spec.seed`; the language
    model's own head is left in place.

    Raises:
        ModelError: the directory is missing, is not a model, is of a kind transformers cannot load as a causal
            language model, lacks weights, or has some that are not finite; the cause is chained.
    """
    path = model_directory(spec)
    from transformers import AutoModelForCausalLM

    with loading(spec), quiet_transformers():
        from_pretrained: Any = AutoModelForCausalLM.from_pretrained  # its type says it returns the model alone
        model, loaded = from_pretrained(
            str(path),
            dtype=getattr(torch, spec.dtype),
            trust_remote_code=spec.trust_remote_code,
            local_files_only=True,
            output_loading_info=True,
        )
    if missing := sorted(loaded["missing_keys"]):
        raise ModelError(f"the weights in {spec.path!r} lack {listed(missing)}")
    if spec.head == "value":
        head = value_head(model, spec)
        with torch.no_grad():
            head.weight.copy_(value_head_weight(_hidden_size(model), spec))
        model.add_module(VALUE_HEAD, head)
    model.to(device)
    check_stored(path, model.named_parameters())
    return model.eval()


@contextmanager
def loading(spec: ModelSpec) -> Iterator[None]:
    """Say of an error inside, but for want of memory, which model could not be loaded.

    Raises:
        ModelError: with the error as its cause.
    """
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise ModelError(
            f"model path {spec.path!r} cannot be loaded as a causal language model: {type(error).__name__}: {error}"
        ) from error


def model_directory(spec: ModelSpec) -> Path:
    """The directory of a model, once it is certain that it is one.

    Raises:
        ModelError: it is missing, or holds no config or no weights.
    """
    path = Path(spec.path)
    if not path.is_dir():
        raise ModelError(f"model path {spec.path!r} is not a directory; give a local Hugging Face model directory")
    if not (path / "config.json").is_file():
        raise ModelError(f"model path {spec.path!r} holds no config.json, so it is not a Hugging Face model directory")
    if not any(next(path.glob(pattern), None) for pattern in WEIGHT_FILES):
        raise ModelError(f"model path {spec.path!r} holds no weights (looked for {' and '.join(WEIGHT_FILES)})")
    return path


def freeze_language_head(model: PreTrainedModel) -> None:
    """Leave the language model's own head without gradients, unless it shares its weight with the embedding.

    Beside a value head it is never run, and weight decay must not shrink it.
    """
    head = model.get_output_embeddings()
    if head is not None and head.weight is not model.get_input_embeddings().weight:
        head.requires_grad_(False)


def value_head(model: PreTrainedModel, spec: ModelSpec) -> torch.nn.Linear:
    """An empty value head for a model, on the device it is made under."""
    return torch.nn.Linear(_hidden_size(model), 1, bias=False, dtype=getattr(torch, spec.dtype))


def value_head_weight(hidden: int, spec: ModelSpec) -> torch.Tensor:
    """`(1, hidden)`: the checkpoint's if it has one, else normal with the standard deviation `1 / sqrt(hidden)`.

    Raises:
        ModelError: the checkpoint's has another shape.
    """
    stored = _stored_tensor(Path(spec.path), f"{VALUE_HEAD}.weight")
    if stored is None:
        drawn = np.random.default_rng(spec.seed).standard_normal((1, hidden), dtype=np.float32)
        return torch.from_numpy(drawn) / hidden**0.5
    if tuple(stored.shape) != (1, hidden):
        raise ModelError(f"{VALUE_HEAD}.weight in {spec.path!r} has shape {tuple(stored.shape)}, not {(1, hidden)}")
    return stored


def _hidden_size(model: PreTrainedModel) -> int:
    return model.config.get_text_config().hidden_size


def _stored_tensor(path: Path, name: str) -> torch.Tensor | None:
    """Read one tensor from a directory's safetensors files, or None where none of them has it."""
    from safetensors import safe_open

    for file in sorted(path.glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as tensors:
            if name in tensors.keys():  # noqa: SIM118 (safe_open has keys() only)
                return tensors.get_tensor(name)
    return None
