"""The `fsdp` training engine: any Hugging Face causal LM, sharded over its ranks by PyTorch's FSDP2."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from enginehouse.engines.mesh import Mesh
from enginehouse.engines.train import ALL, LossSpec, Metrics, Outputs
from enginehouse.modeling.files import parts_of
from enginehouse.modeling.loading import quiet_transformers
from enginehouse.modeling.random_state import random_states, restore_random_states
from enginehouse.modeling.ranks import Ranks, device_of
from enginehouse.modeling.schedule import learning_rate
from enginehouse.modeling.state import stored_names, unique_state
from enginehouse.modeling.token_model import TokenModel
from enginehouse_fsdp import checkpoint, export
from enginehouse_fsdp.optimizer import ShardedAdamW
from enginehouse_fsdp.sharding import device_mesh, reshard, sharded_model
from enginehouse_fsdp.weights import ShardedWeights

if TYPE_CHECKING:
    from enginehouse.data import Batch
    from enginehouse.engines.model import ModelSpec, ProcessContext
    from enginehouse_fsdp.options import FSDPOptions


class FSDPEngine:
    """`TrainEngine` on FSDP2 (`enginehouse.engines.train`), one object a rank.

    Parameters and optimizer state are float32 shards; a model of a half-precision dtype computes in that dtype
    (`MixedPrecisionPolicy`), and its weights leave in it.
    """

    mesh: Mesh

    def setup(self, model: ModelSpec, options: FSDPOptions, context: ProcessContext) -> None:
        """Join the ranks, and build, shard and load the model. Optimizer state is made when it is first needed.

        Raises:
            ModelError: the model cannot be loaded.
            ConfigError: the schedule decays and `total_steps` is not set, or ranks and replicas do not fit.
        """
        learning_rate(options.warmup_steps, options)
        self._spec, self._options, self._context = model, options, context
        device = device_of(context)
        self._ranks = Ranks.join(context, alone=True)
        axes = device_mesh(device, context.world_size, options.replicas)
        sizes = dict(zip(axes.mesh_dim_names or (), axes.shape, strict=True))
        self.mesh = Mesh.of(sizes, context.rank)
        self._model = sharded_model(model, options, axes, device)
        head = self._model.get_output_embeddings()
        if model.head == "value" and head is not None and head.weight is not self._model.get_input_embeddings().weight:
            head.requires_grad_(False)  # it is never run: weight decay must not shrink it
        self._stored = stored_names(Path(model.path))
        self._computing = TokenModel(
            self._model,
            device=device,
            tokens_per_microbatch=options.tokens_per_microbatch,
            share_prompts=options.share_prompts == "auto",
            passes=self._most,
        )
        reshard(self._model)  # it was tried out
        self._optimizer: ShardedAdamW | None = None

    def forward(self, batch: Batch, outputs: Outputs) -> Batch:
        """Compute `outputs` without gradients; only for the tokens of `loss_mask` where the batch has one."""
        try:
            return self._computing.forward(batch, outputs)
        finally:
            reshard(self._model)  # no backward pass follows that would

    def forward_backward(self, batch: Batch, loss: LossSpec) -> Metrics:
        """Accumulate the gradient of `loss`, which is computed from the tokens of `loss_mask` alone."""
        optimizer = self._built_optimizer()
        metrics, weight = self._computing.forward_backward(batch, loss)
        optimizer.count(weight)
        return metrics

    def optim_step(self) -> Metrics:
        """Normalise, clip and take one AdamW step; see `ShardedAdamW.step`."""
        return self._built_optimizer().step()

    def _most(self, own: int) -> int:
        """The largest of all ranks' numbers."""
        most = torch.tensor(own)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return int(most)

    def _built_optimizer(self) -> ShardedAdamW:
        """The optimizer, made at first use: its state is twice as large as the model."""
        if self._optimizer is None:
            trained = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
            self._optimizer = ShardedAdamW(trained, self._options)
        return self._optimizer

    # Weights and files

    def weight_source(self) -> ShardedWeights:
        """The live weights under their Hugging Face names, tied ones once."""
        return ShardedWeights(self._model, self._stored, getattr(torch, self._spec.dtype))

    def save(self, path: str, what: tuple[str, ...] = ALL) -> None:
        """Write `"model"`, `"optimizer"` (with the schedule) and `"rng"`, whole or not at all; collective."""
        parts = parts_of(what)
        state = self._state(parts)
        if "optimizer" in parts:
            state["optimizer.step"] = torch.tensor(self._built_optimizer().step_number)
        if "rng" in parts:
            for rank, own in enumerate(self._ranks.gather(random_states())):
                state |= {f"rng.{kind}.{rank}": value for kind, value in own.items()}
        checkpoint.save(path, state, self._ranks)

    def load(self, path: str, what: tuple[str, ...] = ALL) -> None:
        """Load what `save` wrote, with any number of ranks; collective.

        A rank the checkpoint has no random state of keeps its own.

        Raises:
            CheckpointError: it is missing, incomplete or of another model.
        """
        parts = parts_of(what)
        state = self._state(parts)
        if "optimizer" in parts:
            state["optimizer.step"] = torch.zeros((), dtype=torch.int64)
        if "rng" in parts:
            own = {f"rng.{kind}.{self._ranks.rank}": value for kind, value in random_states().items()}
            there = set(checkpoint.entries(path, "rng."))
            state |= {name: value for name, value in own.items() if name in there}
        checkpoint.load(path, state)
        if "optimizer" in parts:
            self._built_optimizer().restored(int(state["optimizer.step"]))
        if "rng" in parts:
            own_states = {kind: state.get(f"rng.{kind}.{self._ranks.rank}") for kind in random_states()}
            restore_random_states({kind: value for kind, value in own_states.items() if value is not None})

    def _state(self, parts: tuple[str, ...]) -> dict[str, torch.Tensor]:
        """The live tensors of `"model"` and `"optimizer"`, by their names in a checkpoint."""
        state: dict[str, torch.Tensor] = {}
        if "model" in parts:
            state |= {f"model.{name}": tensor for name, tensor in unique_state(self._model, self._stored).items()}
        if "optimizer" in parts:
            state |= {f"optimizer.{name}": tensor for name, tensor in self._built_optimizer().state().items()}
        return state

    def export_hf(self, path: str) -> None:
        """Write a Hugging Face directory, with the tokenizer of the directory the model came from; collective."""
        directory = Path(path)
        source = self.weight_source()
        self._ranks.on_rank_zero(lambda: directory.mkdir(parents=True, exist_ok=True))
        export.write_weights(directory, source.metadata(), source.iter_full(), writes=self._ranks.rank == 0)

        def finish() -> None:
            with quiet_transformers():
                export.write_companions(directory, self._model, getattr(torch, self._spec.dtype), Path(self._spec.path))

        self._ranks.on_rank_zero(finish)

    def shutdown(self) -> None:
        """Release the model and leave the process group."""
        self._optimizer = None
        del self._model, self._computing
        self._ranks.leave()
