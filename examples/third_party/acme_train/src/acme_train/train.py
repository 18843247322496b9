"""The training engine `acme_train`: a transformers model with a copy on each rank. accelerate sums over the ranks.

The contract is `enginehouse.engines.train`. `enginehouse_torch.modeling` handles rows without padding, logprobs,
losses and micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from enginehouse.data import Batch
from enginehouse.engines import ALL, LossSpec, Mesh, Metrics, ModelSpec, Outputs, ParamMeta, ProcessContext
from enginehouse.errors import ModelError
from enginehouse.quiet import quiet_transformers
from enginehouse.weights import stored_names, unique_state
from enginehouse_torch.modeling import checkpoint
from enginehouse_torch.modeling.export import write_companions
from enginehouse_torch.modeling.files import parts_of
from enginehouse_torch.modeling.loading import load_model
from enginehouse_torch.modeling.ranks import Ranks
from enginehouse_torch.modeling.schedule import learning_rate
from enginehouse_torch.modeling.token_model import TokenModel

from acme_train.optimizer import Optimizer
from acme_train.train_options import AcmeTrainOptions


class AcmeTrainEngine:
    """Implements `enginehouse.engines.train.TrainEngine`."""

    mesh: Mesh

    def setup(self, model: ModelSpec, options: AcmeTrainOptions, context: ProcessContext) -> None:
        """Load the model, and give every rank the weights of the first rank.

        Raises:
            ModelError: the model cannot be loaded, or the config asks for another dtype than float32.
            ConfigError: the schedule decays, and `total_steps` is not set.
        """
        learning_rate(options.warmup_steps, options)
        if model.dtype != "float32" or model.head != "causal_lm":
            raise ModelError(f"acme_train trains causal language models in float32, not {model.head} in {model.dtype}")
        self._spec = model
        self._ranks = Ranks.join(context)  # accelerate uses this process group
        self._accelerator = Accelerator(cpu=context.device == "cpu")
        self.mesh = Mesh.of({"dp": context.world_size}, context.rank)
        self._model = load_model(model, self._accelerator.device)
        self._stored = stored_names(Path(model.path))
        self._ranks.broadcast(unique_state(self._model).values())
        self._token_model = TokenModel(
            self._model,
            device=self._model.device,
            tokens_per_microbatch=options.tokens_per_microbatch,
            share_prompts=False,
        )
        self._optimizer = Optimizer(dict(self._model.named_parameters()), options, self._accelerator)

    def forward(self, batch: Batch, outputs: Outputs) -> Batch:
        """Compute `outputs` without gradients; if there is a `loss_mask`, only for the tokens that it marks."""
        return self._token_model.forward(batch, outputs)

    def forward_backward(self, batch: Batch, loss: LossSpec) -> Metrics:
        """Add up the gradient of the loss's sums, and its weight."""
        metrics, weight = self._token_model.forward_backward(batch, loss)
        self._optimizer.count(weight)
        return metrics

    def optim_step(self) -> Metrics:
        """Take one optimizer step."""
        return self._optimizer.step()

    def weight_source(self) -> Weights:
        """Return the current weights."""
        return Weights(unique_state(self._model, self._stored))

    def save(self, path: str, what: tuple[str, ...] = ALL) -> None:
        """Write `"model"`, `"optimizer"` and `"rng"`, completely or not at all; collective.

        Raises:
            CheckpointError: the checkpoint cannot be written.
        """
        checkpoint.save(path, self._state(what), self._ranks)

    def load(self, path: str, what: tuple[str, ...] = ALL) -> None:
        """Load what `save` wrote, with any number of ranks; collective.

        Raises:
            CheckpointError: the checkpoint is missing, incomplete, damaged or of another model.
        """
        checkpoint.load(path, self._state(what), self._ranks)

    def _state(self, what: tuple[str, ...]) -> checkpoint.TrainState:
        parts = parts_of(what)
        model = unique_state(self._model, self._stored) if "model" in parts else None
        return checkpoint.TrainState(model, self._optimizer if "optimizer" in parts else None, rng="rng" in parts)

    def export_hf(self, path: str) -> None:
        """Write the model as transformers does, with its tokenizer; collective."""

        def write() -> None:
            with quiet_transformers():
                self._model.save_pretrained(path)
                write_companions(
                    Path(path),
                    self._model.config,
                    self._model.generation_config,
                    self._model.dtype,
                    type(self._model).__name__,
                    self._spec,
                )

        self._ranks.on_rank_zero(write)

    def shutdown(self) -> None:
        """Release the model and leave the process group."""
        del self._model, self._token_model, self._optimizer, self._accelerator
        AcceleratorState._reset_state(reset_partial_state=True)  # global state, which the next engine must not find
        GradientState._reset_state()
        self._ranks.leave()


class Weights:
    """Weights by their names in the checkpoint. Every rank holds all of them. Implements `WeightSource`."""

    def __init__(self, tensors: dict[str, torch.Tensor]):
        self._tensors = tensors

    def metadata(self) -> list[ParamMeta]:
        """Return the metadata of all weights. Tied weights occur once."""
        return [ParamMeta.of(name, tensor) for name, tensor in self._tensors.items()]

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield all weights."""
        return iter(self._tensors.items())

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield this rank's parts, which are all weights."""
        return self.iter_full()
