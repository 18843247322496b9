"""The protocol of a training engine: one object per rank, driven by the controller in lock step.

Token conventions, the same for every engine and every loss:

* `input_ids` (ragged int64) holds the whole sequence of a row, prompt and response, without padding.
* Every other per-token column is ragged with the same offsets and is *aligned with the token it speaks of*:
  `logprobs[t]` is log p(token t | tokens before t). Position 0 of a row has no prediction: its value is 0.
* `loss_mask` (ragged bool) is true for the tokens the policy chose and the loss counts. It is false at position 0.
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
"""Every tag, where a method takes tags."""


class NonFiniteWeights(EnginehouseError):
    """An optimizer step left a weight that is not finite: what the actor holds is lost, and must not be kept."""

    keeps_state = False


@dataclass(frozen=True, slots=True)
class Outputs:
    """Which per-token outputs a forward pass computes, each a ragged float32 column named like the field.

    Attributes:
        logprobs: log-probability of each token given those before it.
        entropy: entropy in nats of the distribution each token was drawn from.
        values: value of the state each token was drawn from: the value head's output at the token before it
            (engines with `ModelSpec.head == "value"`).
        temperature: logits are divided by it before logprobs and entropy, as the sampler does.
        entropy_gradient: whether the loss may depend on the entropy. Where it is only measured, an engine may leave
            its gradient out, which costs time.
    """

    logprobs: bool = True
    entropy: bool = False
    values: bool = False
    temperature: float = 1.0
    entropy_gradient: bool = True


@dataclass(frozen=True, slots=True)
class LossSpec:
    """A loss by name, never a closure: it must cross processes and Python environments.

    Attributes:
        name: a registered loss (`enginehouse plugins list`) or `"module:function"`.
        arguments: keyword arguments of the loss function; plain data.
        outputs: what the engine hands the loss.
        wraps: name of the loss that this one is made around, which is what messages speak of; empty: none.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    outputs: Outputs = Outputs()
    wraps: str = ""


@dataclass(frozen=True, slots=True)
class TokenView:
    """What a loss function sees of one micro-batch: flat columns over its tokens, no padding.

    A loss is `loss(view, **arguments) -> LossValue`. Engines build the view; a loss never sees logits, and
    never knows how the batch was cut.

    Attributes:
        outputs: `logprobs`, `entropy`, `values`, each float32 `(tokens,)` with a gradient (`entropy` without one where
            `Outputs.entropy_gradient` is false).
        columns: the batch's ragged columns, each `(tokens,)`, and its dense columns, each `(rows, ...)`.
        row: int64 `(tokens,)`, the row each token belongs to.
        rows: number of rows.
    """

    outputs: Mapping[str, torch.Tensor]
    columns: Mapping[str, torch.Tensor]
    row: torch.Tensor
    rows: int


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean kept as its sum and its weight, so that means over parts add up to the mean over the whole."""

    total: float
    weight: float

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.weight + other.weight)

    @property
    def value(self) -> float:
        """`total / weight`; 0 where nothing was counted."""
        return self.total / self.weight if self.weight else 0.0


@dataclass(frozen=True, slots=True)
class Max:
    """The largest of what was measured: put together with `+` like `Mean`, so that parts give the whole's."""

    value: float

    def __add__(self, other: Max) -> Max:
        """The larger one; NaN if either is."""
        return self if math.isnan(self.value) or self.value > other.value else other


@dataclass(frozen=True, slots=True)
class LossValue:
    """The result of a loss function on one micro-batch, as parts that add up over micro-batches and ranks.

    The engine minimises `sum(total) / sum(weight)` over all micro-batches of all data-parallel ranks since the
    last `optim_step`, so no result depends on how the batch was cut.

    Attributes:
        total: scalar tensor with a gradient: the loss summed over what `weight` counts.
        weight: the number (of tokens, or of sequences) the mean divides by.
        metrics: further figures worth logging; keys without prefix.
    """

    total: torch.Tensor
    weight: float
    metrics: Mapping[str, Mean | Max] = field(default_factory=dict)


Metrics = Mapping[str, float | Mean | Max]
"""Metrics of one call on one rank: `Mean`s and `Max`es are merged over ranks, floats are equal on every rank."""


def merge_metrics(parts: Iterable[Metrics | None]) -> dict[str, float | Mean | Max]:
    """Merge the metrics of several ranks or calls: `Mean`s and `Max`es add, for floats the last one stands."""
    merged: dict[str, float | Mean | Max] = {}
    for part in parts:
        for name, value in (part or {}).items():
            merged[name] = _merge(merged.get(name), value)
    return merged


def metric_values(metrics: Metrics) -> dict[str, float]:
    """Metrics as they are logged: each mean and each maximum as its value."""
    return {name: value.value if isinstance(value, (Mean, Max)) else value for name, value in metrics.items()}


def _merge(merged: float | Mean | Max | None, value: float | Mean | Max) -> float | Mean | Max:
    if isinstance(merged, Mean) and isinstance(value, Mean):
        return merged + value
    if isinstance(merged, Max) and isinstance(value, Max):
        return merged + value
    return value


@runtime_checkable
class TrainEngine(Protocol):
    """One training backend's object on one rank.

    All methods are called on every rank of the group in the same order, and may communicate. `batch` is this
    rank's data shard (every rank of a model-parallel replica gets the same one). Shards may differ in length,
    and a shard may be empty.
    """

    mesh: Mesh

    def setup(self, model: ModelSpec, options: Any, context: ProcessContext) -> None:
        """Load the model and build optimizer and schedule.

        Args:
            model: what to load.
            options: an instance of the backend's own options class (`TrainBackend.options`).
            context: this process's place.

        Raises:
            ModelError: the model cannot be loaded by this engine.
            UserError: the options do not fit the model or the number of processes.
        """
        ...

    def forward(self, batch: Batch, outputs: Outputs) -> Batch | None:
        """Compute `outputs` for `input_ids` without gradients, in evaluation mode.

        Where the batch has a `loss_mask`, only for the tokens it marks, and the others are 0; otherwise for all.

        Returns:
            On output ranks a batch of the same rows in the same order with only the asked columns, ragged
            float32 aligned with `input_ids`; elsewhere None.
        """
        ...

    def forward_backward(self, batch: Batch, loss: LossSpec) -> Metrics:
        """Accumulate the gradient of `loss` over this shard, in micro-batches under the token budget.

        May be called several times before `optim_step`. Metrics hold `loss` and what the loss reports, as
        `Mean`s of this rank's part (output ranks; empty elsewhere).
        """
        ...

    def optim_step(self) -> Metrics:
        """Reduce and normalise gradients over the group, clip, step, advance the schedule, zero gradients.

        A step whose gradient norm is not finite changes neither weights nor optimizer state.

        Returns:
            `grad_norm` (before clipping), `lr` (used by this step) and `skipped` (1.0 if not finite), as floats.

        Raises:
            NonFiniteWeights: the step left a weight that is not finite, on whichever rank; raised on all of them.
        """
        ...

    def weight_source(self) -> WeightSource:
        """Give access to the current weights under their Hugging Face names."""
        ...

    def save(self, path: str, what: tuple[str, ...] = ALL) -> None:
        """Write a checkpoint, `"model"`, `"optimizer"`, `"rng"`, into the directory `path`; whole or not at all.

        What `path` held is replaced once the new one is whole.
        """
        ...

    def load(self, path: str, what: tuple[str, ...] = ALL) -> None:
        """Load what `save` wrote, whatever the topology it was written from."""
        ...

    def export_hf(self, path: str) -> None:
        """Write the model into the directory `path`, in Hugging Face form: safetensors, config, and any tokenizer.

        The engine makes the directory. The caller gives a path of its own and moves it into place once it is whole.
        With adapters: the merged model.
        """
        ...

    def shutdown(self) -> None:
        """Release everything, threads and process groups too; the engine is not used again, but the process may be."""
        ...


# What an engine may offer beyond that: it has these methods where its backend declares the capability.


class OffloadsState(Protocol):
    """Capability `offload`."""

    def offload(self, tags: tuple[str, ...] = ALL) -> None:
        """Put `"params"`, `"grads"`, `"optimizer"` away; the accelerator's memory is free when this returns.

        What is away is not used, saved or loaded: whatever needs it raises.
        """
        ...

    def onload(self, tags: tuple[str, ...] = ALL) -> None:
        """Bring what `offload` moved away back; nothing to do for what is there."""
        ...


class SavesInBackground(Protocol):
    """Capability `background_save`."""

    def save_in_background(self, path: str, what: tuple[str, ...] = ALL) -> None:
        """As `save`, but return once the state is copied, and write while training goes on.

        One save is under way at a time: a further one waits for the first, and raises what made that fail.
        """
        ...

    def finish_save(self) -> None:
        """Return once the save under way is whole, if there is one; raise what made it fail. Collective."""
        ...


class TrainsAdapters(Protocol):
    """Capability `lora`."""

    def forward_base(self, batch: Batch, outputs: Outputs) -> Batch | None:
        """As `forward`, of the model without its adapters: what a KL term holds an adapted model near to."""
        ...

    def export_adapter(self, path: str) -> None:
        """Write the adapters alone into the directory `path`, in the form `peft` reads; collective."""
        ...
