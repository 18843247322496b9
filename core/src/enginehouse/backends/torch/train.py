"""The built-in training engine: any Hugging Face causal LM in plain PyTorch, replicated over data-parallel ranks.

The laptop default, and the oracle other engines are compared with: it holds the whole model on every rank and does
nothing to it that changes a result. There is never any dropout, in training neither: a policy's logprobs must be the
same whoever computes them.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from enginehouse.backends.torch import checkpoint
from enginehouse.backends.torch.optim import FlatAdamW
from enginehouse.backends.torch.weights import ReplicatedWeights
from enginehouse.data import Batch
from enginehouse.engines.mesh import Mesh
from enginehouse.engines.model import TOKENIZER_COMPANIONS, TOKENIZER_FILES
from enginehouse.engines.train import ALL, LossSpec, Metrics, Outputs
from enginehouse.modeling.files import parts_of, whole_directory
from enginehouse.modeling.loading import load_model, quiet_transformers
from enginehouse.modeling.random_state import random_states, restore_random_states
from enginehouse.modeling.ranks import Ranks, device_of
from enginehouse.modeling.schedule import learning_rate
from enginehouse.modeling.state import stored_names, unique_state
from enginehouse.modeling.token_model import TokenModel

if TYPE_CHECKING:
    from enginehouse.backends.torch.options import TorchTrainOptions
    from enginehouse.engines.model import ModelSpec, ProcessContext


class TorchTrainEngine:
    """`TrainEngine` on plain PyTorch (`enginehouse.engines.train`), one object a rank."""

    mesh: Mesh

    def setup(self, model: ModelSpec, options: TorchTrainOptions, context: ProcessContext) -> None:
        """Join the ranks, load the model and give every rank rank 0's weights.

        Optimizer state is made when it is first needed: an engine that only computes logprobs never has any.

        Raises:
            ModelError: the model cannot be loaded.
            ConfigError: the schedule decays and `total_steps` is not set.
        """
        learning_rate(options.warmup_steps, options)
        self._spec, self._options, self._context = model, options, context
        self._ranks = Ranks.join(context)
        self.mesh = Mesh.of({"dp": context.world_size}, context.rank)
        self._model = load_model(model, device_of(context))
        self._stored = stored_names(Path(model.path))
        if model.head == "value":
            # The language model's own head gets no gradient: weight decay must not shrink it.
            _untied_head(self._model).requires_grad_(False)
        self._ranks.broadcast(unique_state(self._model).values())
        self._computing = TokenModel(
            self._model,
            device=self._model.device,
            tokens_per_microbatch=options.tokens_per_microbatch,
            share_prompts=options.share_prompts == "auto",
        )
        self._optimizer: FlatAdamW | None = None

    # Computing

    def forward(self, batch: Batch, outputs: Outputs) -> Batch:
        """Compute `outputs` without gradients.

        Where the batch has a `loss_mask`, only for the tokens it marks; all others are 0.
        """
        return self._computing.forward(batch, outputs)

    def forward_backward(self, batch: Batch, loss: LossSpec) -> Metrics:
        """Accumulate the gradient of `loss`, which is computed from the tokens of `loss_mask` alone."""
        optimizer = self._built_optimizer()
        metrics, weight = self._computing.forward_backward(batch, loss)
        optimizer.count(weight)
        return metrics

    def optim_step(self) -> Metrics:
        """Reduce gradients over the ranks and take one AdamW step; see `FlatAdamW.step`."""
        return self._built_optimizer().step()

    def _built_optimizer(self) -> FlatAdamW:
        """The optimizer, made at first use: buffers as large as the model itself."""
        if self._optimizer is None:
            trained = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
            self._optimizer = FlatAdamW(trained, self._options, self._ranks.world_size)
        return self._optimizer

    # Weights and files

    def weight_source(self) -> ReplicatedWeights:
        """The live weights under their Hugging Face names, tied ones once; every rank holds all of them."""
        return ReplicatedWeights(self._model, self._stored)

    def save(self, path: str, what: tuple[str, ...] = ALL) -> None:
        """Write `"model"`, `"optimizer"` (with the schedule) and `"rng"`, whole or not at all; collective."""
        parts = parts_of(what)
        states = self._ranks.gather(random_states() if "rng" in parts else {})

        def write() -> None:
            with whole_directory(path) as directory:
                if "model" in parts:
                    checkpoint.write_part(directory, "model", unique_state(self._model))
                if "optimizer" in parts:
                    optimizer = self._built_optimizer()
                    checkpoint.write_part(
                        directory, "optimizer", dict(optimizer.state()), {"step": optimizer.step_number}
                    )
                if "rng" in parts:
                    checkpoint.write_part(
                        directory,
                        "rng",
                        {f"{kind}/{rank}": s for rank, own in enumerate(states) for kind, s in own.items()},
                    )

        self._ranks.on_rank_zero(write)

    def load(self, path: str, what: tuple[str, ...] = ALL) -> None:
        """Load what `save` wrote, with any number of ranks; each rank reads the files itself.

        A rank the checkpoint has no random state of keeps its own.

        Raises:
            CheckpointError: it is missing, incomplete or of another model.
        """
        parts = parts_of(what)
        if "model" in parts:
            checkpoint.read_into(path, "model", unique_state(self._model))
            if self._optimizer is not None:
                self._optimizer.parameters_changed()
        if "optimizer" in parts:
            optimizer = self._built_optimizer()
            optimizer.restored(checkpoint.read_into(path, "optimizer", dict(optimizer.state()))["step"])
        if "rng" in parts:
            stored = checkpoint.read_part(path, "rng")
            own = {
                kind: stored[f"{kind}/{self._ranks.rank}"]
                for kind in random_states()
                if f"{kind}/{self._ranks.rank}" in stored
            }
            restore_random_states(own)

    def export_hf(self, path: str) -> None:
        """Write a Hugging Face directory, with the tokenizer of the directory the model came from; collective."""

        def write() -> None:
            directory = Path(path)
            with quiet_transformers():
                self._model.save_pretrained(directory)
                for pattern in (*TOKENIZER_FILES, *TOKENIZER_COMPANIONS):
                    for file in filter(Path.is_file, Path(self._spec.path).glob(pattern)):
                        shutil.copyfile(file, directory / file.name)

        self._ranks.on_rank_zero(write)

    def shutdown(self) -> None:
        """Release the model and leave the process group."""
        self._optimizer = None
        del self._model, self._computing
        self._ranks.leave()


def _untied_head(model: Any) -> torch.nn.Module:
    """The model's own output layer if it shares no parameter with the rest, else an empty module."""
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    return torch.nn.Identity() if head.weight is embedding.weight else head
