"""Checks a model's files for `plan` against the model's class, which is built empty on the meta device."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

from enginehouse.errors import ModelError, listed
from enginehouse.weights.names import weight_files
from enginehouse_torch.modeling.holding import Holding
from enginehouse_torch.modeling.loading import empty_model, put_value_head

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from enginehouse.engines.model import ModelSpec

Stamps = tuple[tuple[str, int, int], ...]


def examine(spec: ModelSpec) -> tuple[str, ...]:
    """Check that transformers has a class for the model, that the class reads the files, and that engines can train it.

    Returns:
        Notes on the tensors that are not trained, one sentence each.

    Raises:
        ModelError: there is no such class, or the files belong to another model.
    """
    return _examine_cached(spec, _stamps(spec))[1]


def examine_for_sampling(spec: ModelSpec) -> tuple[str, ...]:
    """Check a model as `examine` does, and that it can be sampled with a plain cache; return no notes.

    Raises:
        ModelError: as `examine`, or if a layer has state other than keys and values.
    """
    model, _ = _examine_cached(spec, _stamps(spec))
    if getattr(model, "_is_stateful", False):
        raise ModelError(
            f"{spec.path!r} is a {type(model).__name__}, and some of its layers keep state other than keys and values: "
            "the torch rollout engine cannot generate with it; choose another rollout engine"
        )
    return ()


def examined_model(spec: ModelSpec) -> PreTrainedModel:
    """Return the empty model that `examine` has built. Callers must not change it."""
    return _examine_cached(spec, _stamps(spec))[0]


def _stamps(spec: ModelSpec) -> Stamps:
    """Return names, sizes and times of a model's files, so that a model is examined again when a file changes."""
    files = [*weight_files(Path(spec.path)), *Path(spec.path).glob("*.json"), *Path(spec.path).glob("*.py")]
    return tuple((str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files)


@functools.lru_cache(maxsize=4)  # several roles have the same model
def _examine_cached(spec: ModelSpec, stamps: Stamps) -> tuple[PreTrainedModel, tuple[str, ...]]:
    model = empty_model(spec)
    gone = put_value_head(model, spec) if spec.head == "value" else set()
    holding = Holding.from_model(model, spec, gone)
    if lacking := holding.find_missing(model):
        raise ModelError(f"the weights in {spec.path!r} lack {listed(lacking)}")
    holding.check_shapes(model)
    return model, tuple(holding.notes())
