"""Loading a Hugging Face causal language model from a directory, for training and rollout engines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from enginehouse.engines.model import ModelSpec
from enginehouse.errors import ModelError, listed
from enginehouse.quiet import quiet_transformers
from enginehouse.weights.names import stored_names
from enginehouse_torch.modeling.finite import check_stored
from enginehouse_torch.modeling.holding import EARLIER_VALUE_HEAD, VALUE_HEAD, Holding, freeze, read_tensor
from enginehouse_torch.modeling.memory import is_out_of_memory

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

__all__ = ["load_model"]

WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")


def load_model(spec: ModelSpec, device: torch.device | str) -> PreTrainedModel:
    """Load the model of `spec` onto `device`, in evaluation mode (no dropout), every weight from the checkpoint.

    With `spec.head == "value"` the model has the submodule `score` in place of the language model's own head, a
    `torch.nn.Linear(hidden, 1)` without bias: `score.weight` of the checkpoint if it has one, else zeros.

    Raises:
        ModelError: the directory is missing, is not a model, is of a kind that transformers cannot load as a causal
            language model, or lacks weights, or holds weights that belong to another model or are not finite. The
            cause is chained.
    """
    return load_with_holding(spec, device)[0]


def load_with_holding(spec: ModelSpec, device: torch.device | str) -> tuple[PreTrainedModel, Holding]:
    """Load a model like `load_model`, freeze the parameters that no text reaches, and return its `Holding` too."""
    path = model_directory(spec)
    from transformers import AutoModelForCausalLM

    check_kind(spec)
    with explain_errors(spec), quiet_transformers():
        from_pretrained: Any = AutoModelForCausalLM.from_pretrained  # its type omits the loading info
        model, loaded = from_pretrained(
            str(path),
            dtype=getattr(torch, spec.dtype),
            trust_remote_code=spec.trust_remote_code,
            local_files_only=True,
            output_loading_info=True,
        )
    missing = set(loaded["missing_keys"])
    removed: set[str] = set()
    if spec.head == "value":
        missing -= (removed := put_value_head(model, spec))
        with torch.no_grad():
            model.get_submodule(VALUE_HEAD).weight.copy_(value_head_weight(_hidden_size(model), spec))
    if missing:
        raise ModelError(f"the weights in {spec.path!r} lack {listed(sorted(missing))}")
    holding = Holding.from_model(model, spec, removed)
    freeze(model, holding.unreached)
    model.to(device)
    check_stored(path, model.named_parameters())
    return model.eval(), holding


def empty_model(spec: ModelSpec, empty: AbstractContextManager[object] | None = None) -> PreTrainedModel:
    """Build a model in float32 without its weights; raise as `load_model` does.

    Parameters are created within the context `empty`. If `empty` is None, parameters and buffers are on the meta
    device.
    """
    from transformers import AutoModelForCausalLM

    model_directory(spec)
    config = check_kind(spec)
    with explain_errors(spec), quiet_transformers(), empty or torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, trust_remote_code=spec.trust_remote_code
        )
        model.tie_weights()  # on the meta device each module has its own parameter
    return model


def check_kind(spec: ModelSpec) -> PreTrainedConfig:
    """Check that transformers has a causal language model for a model, and that engines here can run it.

    Returns:
        Its config.

    Raises:
        ModelError: the model is for another task, or its attention is bidirectional or missing.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING, AutoConfig

    with explain_errors(spec), quiet_transformers():
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            spec.path, trust_remote_code=spec.trust_remote_code, local_files_only=True
        )
    (architecture, *_) = config.architectures or [config.model_type]
    text = config.get_text_config()
    custom = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    reason = ""
    if not custom and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        reason = f"transformers has no causal language model of model_type {config.model_type!r}"
    elif not custom and type(config) in MODEL_FOR_MASKED_LM_MAPPING and getattr(config, "is_decoder", True) is False:
        reason = "it is an encoder, whose tokens attend to later tokens (config.json says is_decoder: false)"
    elif missing := [name for name in NEEDED if getattr(text, name, None) is None]:
        reason = f"its config has no {' and no '.join(missing)}"
        if "num_attention_heads" in missing:
            reason = f"it has no attention: {reason}"
    if reason:
        raise ModelError(
            f"{spec.path!r}, a {architecture}, cannot be trained or sampled as a causal language model: {reason}"
        )
    return config


NEEDED = ("num_attention_heads", "num_hidden_layers", "hidden_size", "vocab_size")
"""Attributes of transformers' configs that engines here need."""


@contextmanager
def explain_errors(spec: ModelSpec) -> Iterator[None]:
    """Turn an error in the block, except running out of memory, into an error that names the model.

    Raises:
        ModelError: the error is its cause.
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
    """Return a model's directory. Check its files, and that it has no other head where a value head is needed.

    Raises:
        ModelError: the directory is missing, holds no config or no weights, or has a head that is not a value head.
    """
    path = Path(spec.path)
    if not path.is_dir():
        raise ModelError(f"model path {spec.path!r} is not a directory; give a local Hugging Face model directory")
    if not (path / "config.json").is_file():
        raise ModelError(f"model path {spec.path!r} holds no config.json, so it is not a Hugging Face model directory")
    if not any(next(path.glob(pattern), None) for pattern in WEIGHT_FILES):
        raise ModelError(f"model path {spec.path!r} holds no weights (looked for {' and '.join(WEIGHT_FILES)})")
    if spec.head == "value":
        _check_value_head(path)
    return path


def _check_value_head(path: Path) -> None:
    """Raise ModelError if a checkpoint has a head on its decoder whose output is not one scalar."""
    (architecture, *_) = json.loads((path / "config.json").read_text()).get("architectures") or [""]
    stored = stored_names(path)
    head = f"{VALUE_HEAD}.weight"
    weight = read_tensor(path, head) if head in stored else None
    reason = ""
    if weight is not None and (weight.dim() != 2 or weight.shape[0] != 1):
        reason = f"{VALUE_HEAD}.weight has the shape {tuple(weight.shape)}, one row for each label"
    elif f"{VALUE_HEAD}.bias" in stored:
        reason = f"it has {VALUE_HEAD}.bias"
    elif weight is None and architecture.endswith("Classification"):
        heads = sorted(name for name in stored if name.startswith("classifier"))
        reason = f"it is a {architecture} with {listed(heads) if heads else 'no such weight in its safetensors files'}"
    if reason:
        raise ModelError(
            f"the head in {str(path)!r} is no value head: {reason}. A value head must be {VALUE_HEAD}.weight of shape "
            "(1, hidden) without a bias, as in transformers' ForSequenceClassification with num_labels=1"
        )


def put_value_head(model: PreTrainedModel, spec: ModelSpec, dtype: torch.dtype | None = None) -> set[str]:
    """Replace a language model's own head by an uninitialised value head, on the current device.

    Returns:
        Names of the parameters that the model no longer has.
    """
    output = model.get_output_embeddings()
    removed: set[str] = set()
    if output is not None:
        (name,) = (name for name, module in model.named_modules() if module is output)
        removed = {f"{name}.{leaf}" for leaf in output.state_dict()}
        parent, _, leaf = name.rpartition(".")
        delattr(model.get_submodule(parent), leaf)
    for attribute in ("_tied_weights_keys", "all_tied_weights_keys"):  # the head may be tied to the embedding
        ties = getattr(model, attribute) or {}
        setattr(model, attribute, {name: source for name, source in ties.items() if name not in removed})
    head = torch.nn.Linear(_hidden_size(model), 1, bias=False, dtype=dtype or getattr(torch, spec.dtype))
    model.add_module(VALUE_HEAD, head)
    return removed


def value_head_weight(hidden: int, spec: ModelSpec) -> torch.Tensor:
    """Return the checkpoint's value head, `(1, hidden)`, or zeros if it has none.

    A new critic begins at 0 because its values enter the advantages. With other values, the first steps would train on
    nothing but noise where rewards are rare and advantages normalised.

    Raises:
        ModelError: the checkpoint's value head has another shape.
    """
    names = (f"{VALUE_HEAD}.weight", f"{EARLIER_VALUE_HEAD}.weight")
    path = Path(spec.path)
    name = next((name for name in names if name in stored_names(path)), None)
    if name is None:
        return torch.zeros(1, hidden)
    stored = read_tensor(path, name)
    if tuple(stored.shape) != (1, hidden):
        raise ModelError(f"{name} in {spec.path!r} must have shape {(1, hidden)}, not {tuple(stored.shape)}")
    return stored


def _hidden_size(model: PreTrainedModel) -> int:
    return model.config.get_text_config().hidden_size
