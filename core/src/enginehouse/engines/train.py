"""The protocol of a training engine: one object per rank, driven by the controller in lock step.

Token conventions, the same for every engine and every loss:

* `input_ids` (ragged int64) holds the whole sequence of a row, prompt and response, without padding.
* Every other per-token column is ragged with the same offsets and is *aligned with the token it describes*:
  `logprobs[t]` is log p(token t | tokens before t). Position 0 of a row has no prediction, so its value is 0.
* `loss_mask` (ragged bool) is True for the tokens that the policy chose and the loss counts. It is False at position 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from enginehouse.errors import EnginehouseError

if TYPE_CHECKING:
    import torch

    from enginehouse.data import Batch
    from enginehouse.engines.mesh import Mesh
    from enginehouse.engines.model import ModelSpec, ProcessContext
    from enginehouse.engines.weights import WeightSource

ALL: tuple[str, ...] = ("*",)
"""All tags, for a method that takes tags."""


class NonFiniteWeights(EnginehouseError):
    """An optimizer step made a weight infinite or NaN. The actor's state is lost and must not be saved."""

    keeps_state = False


@dataclass(frozen=True, slots=True)
class Outputs:
    """The per-token outputs of a forward pass. Each is a ragged float32 column named like the field.

    Attributes:
        logprobs: log-probability of each token given the tokens before it, in nats.
        entropy: entropy, in nats, of the distribution that each token was sampled from.
        values: value of the state that each token was sampled from: the output of the value head at the token before it
            (engines with `ModelSpec.head == "value"`).
        temperature: divisor of the logits before logprobs and entropy, as in the sampler.
        entropy_gradient: True if the loss may depend on the entropy. If False, an engine may leave out the gradient of
            the entropy, which saves time.
    """

    logprobs: bool = True
    entropy: bool = False
    values: bool = False
    temperature: float = 1.0
    entropy_gradient: bool = True


@dataclass(frozen=True, slots=True)
class LossSpec:
    """A loss by name. It is never a closure, because it must cross processes and Python environments.

    Attributes:
        name: name of a registered loss (`enginehouse plugins list`) or `"module:function"`.
        arguments: keyword arguments of the loss function; plain data.
        outputs: the outputs that the engine passes to the loss.
        wraps: name of the loss inside this one, for messages; empty if there is none.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    outputs: Outputs = Outputs()
    wraps: str = ""


@dataclass(frozen=True, slots=True)
class TokenView:
    """One micro-batch as a loss function gets it: flat columns over its tokens, without padding.

    A loss is `loss(view, **arguments) -> LossValue`. Engines build the view. A loss gets no logits, and does not know
    how the batch was split.

    Attributes:
        outputs: `logprobs`, `entropy`, `values`, each float32 `(tokens,)` with a gradient. `entropy` has no gradient if
            `Outputs.entropy_gradient` is False.
        columns: the ragged columns of the batch, each `(tokens,)`, and its dense columns, each `(rows, ...)`.
        row: row of each token, int64 `(tokens,)`.
        rows: number of rows.
        counted: result of `counted_tokens`, if the engine computed it on the host; else None.
    """

    outputs: Mapping[str, torch.Tensor]
    columns: Mapping[str, torch.Tensor]
    row: torch.Tensor
    rows: int
    counted: torch.Tensor | None = None

    def counted_tokens(self) -> torch.Tensor:
        """Return the index of each token that `loss_mask` counts, int64 `(counted,)`. Since 1.1.

        `columns["loss_mask"].nonzero()` gives the same indices, but on a GPU it waits for all work so far.
        """
        return self.columns["loss_mask"].nonzero().squeeze(-1) if self.counted is None else self.counted


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean as its sum and weight, so that the means of parts add up to the mean of the whole."""

    total: float
    weight: float

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.weight + other.weight)

    @property
    def value(self) -> float:
        """`total / weight`, or 0 if the weight is 0."""
        return self.total / self.weight if self.weight else 0.0


@dataclass(frozen=True, slots=True)
class Max:
    """A maximum. `+` combines the maxima of parts to the maximum of the whole, as `+` does for `Mean`."""

    value: float

    def __add__(self, other: Max) -> Max:
        """Return the larger of the two maxima, or NaN if one of them is NaN."""
        return self if math.isnan(self.value) or self.value > other.value else other


@dataclass(frozen=True, slots=True)
class LossValue:
    """The result of a loss function on one micro-batch, as sums that add up over micro-batches and ranks.

    The engine minimises `sum(total) / sum(weight)` over all micro-batches of all data-parallel ranks since the last
    `optim_step`, so no result depends on how the batch was split.

    Attributes:
        total: scalar tensor with a gradient: the sum of the loss over the tokens or sequences that `weight` counts.
        weight: number of tokens, or of sequences, by which the sum is divided.
        metrics: further metrics by name, without prefix.
    """

    total: torch.Tensor
    weight: float
    metrics: Mapping[str, Mean | Max] = field(default_factory=dict)


Metrics = Mapping[str, float | Mean | Max]
"""Metrics of one call on one rank. `Mean`s and `Max`es are merged over ranks; floats are equal on every rank."""


def merge_metrics(parts: Iterable[Metrics | None]) -> dict[str, float | Mean | Max]:
    """Merge the metrics of several ranks or calls. `Mean`s and `Max`es are combined with `+`; of several floats only
    the last is kept."""
    merged: dict[str, float | Mean | Max] = {}
    for part in parts:
        for name, value in (part or {}).items():
            merged[name] = _merge(merged.get(name), value)
    return merged


def metric_values(metrics: Metrics) -> dict[str, float]:
    """Return the numbers to log: each `Mean` and each `Max` is replaced by its value."""
    return {name: value.value if isinstance(value, (Mean, Max)) else value for name, value in metrics.items()}


def _merge(merged: float | Mean | Max | None, value: float | Mean | Max) -> float | Mean | Max:
    if isinstance(merged, Mean) and isinstance(value, Mean):
        return merged + value
    if isinstance(merged, Max) and isinstance(value, Max):
        return merged + value
    return value


@runtime_checkable
class TrainEngine(Protocol):
    """One rank's object of a training engine.

    All methods are called on every rank of the group in the same order, and may communicate. `batch` is the data shard
    of this rank; all ranks of a model-parallel replica get the same shard. Shards may differ in length and may be
    empty.
    """

    mesh: Mesh

    def setup(self, model: ModelSpec, options: Any, context: ProcessContext) -> None:
        """Load the model, and build the optimizer and the schedule.

        Args:
            model: the model to load.
            options: an instance of the engine's own options class (`TrainBackend.options`).
            context: the place of this process.

        Raises:
            ModelError: if this engine cannot load the model.
            UserError: if the options do not fit the model or the number of processes.
        """
        ...

    def forward(self, batch: Batch, outputs: Outputs) -> Batch | None:
        """Compute `outputs` for `input_ids` without gradients, in evaluation mode.

        If the batch has a `loss_mask`, only the tokens that it marks are computed, and the others are 0.

        Returns:
            On output ranks, a batch of the same rows in the same order. It has only the requested columns, ragged
            float32 aligned with `input_ids`. On other ranks, None.
        """
        ...

    def forward_backward(self, batch: Batch, loss: LossSpec) -> Metrics:
        """Accumulate the gradient of `loss` over this shard, in micro-batches under the token budget.

        May be called several times before `optim_step`.

        Returns:
            On output ranks, `loss` and the metrics of the loss, as `Mean`s over this rank's part. On other ranks, no
            metrics.
        """
        ...

    def optim_step(self) -> Metrics:
        """Reduce and normalise gradients over the group, clip, step, advance the schedule, and zero gradients.

        A step whose gradient norm is not finite changes neither weights nor optimizer state.

        Returns:
            `grad_norm` (before clipping), `lr` (used by this step) and `skipped` (1.0 if the norm is not finite), as
            floats.

        Raises:
            NonFiniteWeights: on all ranks, if the step made a weight of any rank infinite or NaN.
        """
        ...

    def weight_source(self) -> WeightSource:
        """Give access to the current weights under their Hugging Face names."""
        ...

    def save(self, path: str, what: tuple[str, ...] = ALL) -> None:
        """Write a checkpoint of `"model"`, `"optimizer"` and `"rng"` to the directory `path`, completely or not at all.

        A complete checkpoint replaces the former content of `path`.
        """
        ...

    def load(self, path: str, what: tuple[str, ...] = ALL) -> None:
        """Load a checkpoint of `save`. A different number of ranks requires the capability `reshard_checkpoint`."""
        ...

    def export_hf(self, path: str) -> None:
        """Write the model to the directory `path` in Hugging Face form: safetensors, config, and any tokenizer.

        The engine creates the directory. The caller gives a fresh path and moves it into place once it is complete.
        Adapters are merged into the model.
        """
        ...

    def shutdown(self) -> None:
        """Release everything, also threads and process groups. The process may be used again, but not this engine."""
        ...


# Optional methods of an engine, which must exist if its record declares the capability.


class OffloadsState(Protocol):
    """The methods of capability `offload`."""

    def offload(self, tags: tuple[str, ...] = ALL) -> None:
        """Move `"params"`, `"grads"` and `"optimizer"` away. Their accelerator memory is free when this returns.

        A method that needs, saves or loads an offloaded part raises an error.
        """
        ...

    def onload(self, tags: tuple[str, ...] = ALL) -> None:
        """Bring back the parts that `offload` moved away. Other parts do not change."""
        ...


class SavesInBackground(Protocol):
    """The methods of capability `background_save`."""

    def save_in_background(self, path: str, what: tuple[str, ...] = ALL) -> None:
        """Save like `save`, but return once the state is copied, and write while training continues.

        Only one save runs at a time. A second call waits for the running save, and raises the error of that save if it
        failed.
        """
        ...

    def finish_save(self) -> None:
        """Return once the running save, if any, is complete; raise its error if it failed. Collective."""
        ...


class TrainsAdapters(Protocol):
    """The methods of capability `lora`."""

    def forward_base(self, batch: Batch, outputs: Outputs) -> Batch | None:
        """Compute `forward` without the adapters. A KL term uses the result as its reference."""
        ...

    def export_adapter(self, path: str) -> None:
        """Write only the adapters into the directory `path`, in the form that `peft` reads. Collective."""
        ...


class SendsAdapters(Protocol):
    """The methods of capability `adapter_updates`."""

    def adapter_source(self) -> WeightSource:
        """Give access to the current A and B of each adapter in `ModelSpec.dtype`, under the names of a file of `peft`,
        such as `base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight`."""
        ...
