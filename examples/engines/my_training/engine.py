"""A training engine: the complete model on every rank, gradients summed over the ranks, AdamW."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from enginehouse.data import Batch
from enginehouse.engines import ALL, LossSpec, Mesh, Metrics, ModelSpec, Outputs, ParamMeta, ProcessContext
from enginehouse.weights import stored_names, unique_state
from enginehouse_torch.modeling import checkpoint
from enginehouse_torch.modeling.export import write_companions, write_weights
from enginehouse_torch.modeling.files import parts_of
from enginehouse_torch.modeling.finite import check_step
from enginehouse_torch.modeling.loading import load_model
from enginehouse_torch.modeling.ranks import Ranks, device_of
from enginehouse_torch.modeling.schedule import learning_rate
from enginehouse_torch.modeling.token_model import TokenModel
from my_training.options import Options


class Engine:
    """`TrainEngine`. Each rank has one object."""

    mesh: Mesh

    def setup(self, model: ModelSpec, options: Options, context: ProcessContext) -> None:
        """Load the model, the same on every rank."""
        learning_rate(options.warmup_steps, options)
        self._spec, self._options = model, options
        self._ranks = Ranks.join(context)
        self.mesh = Mesh.of({"dp": context.world_size}, context.rank)
        self._model = load_model(model, device_of(context))
        self._stored = stored_names(Path(model.path))
        self._ranks.broadcast(unique_state(self._model).values())
        self._tokens = TokenModel(
            self._model,
            device=self._model.device,
            tokens_per_microbatch=options.tokens_per_microbatch,
            share_prompts=False,
        )
        self._optimizer = Optimizer(self._model, options)
        self._weight = 0.0

    def forward(self, batch: Batch, outputs: Outputs) -> Batch:
        """Compute `outputs`."""
        return self._tokens.forward(batch, outputs)

    def forward_backward(self, batch: Batch, loss: LossSpec) -> Metrics:
        """Accumulate the gradient of the loss's sum, and its weight."""
        metrics, weight = self._tokens.forward_backward(batch, loss)
        self._weight += weight
        return metrics

    def optim_step(self) -> Metrics:
        """Sum gradients and weights over the ranks, divide, clip and step."""
        weight = torch.tensor(self._weight, dtype=torch.float64)
        self._weight = 0.0
        gradients = self._optimizer.gradients()
        if self._ranks.world_size > 1:
            for tensor in (weight, *gradients):
                dist.all_reduce(tensor)
        torch._foreach_div_(gradients, max(float(weight), 1.0))
        return self._optimizer.step()

    def weight_source(self) -> Weights:
        """Return the live weights."""
        return Weights(unique_state(self._model, self._stored))

    def save(self, path: str, what: tuple[str, ...] = ALL) -> None:
        """Write a checkpoint."""
        checkpoint.save(path, self._state(what), self._ranks)

    def load(self, path: str, what: tuple[str, ...] = ALL) -> None:
        """Load a checkpoint."""
        checkpoint.load(path, self._state(what), self._ranks)

    def _state(self, what: tuple[str, ...]) -> checkpoint.TrainState:
        parts = parts_of(what)
        return checkpoint.TrainState(
            unique_state(self._model, self._stored) if "model" in parts else None,
            self._optimizer if "optimizer" in parts else None,
            rng="rng" in parts,
        )

    def export_hf(self, path: str) -> None:
        """Write the model as a Hugging Face directory."""

        def write() -> None:
            Path(path).mkdir(parents=True, exist_ok=True)
            source, config = self.weight_source(), self._model.config
            failure = write_weights(Path(path), source.metadata(), source.iter_full(), True)
            if failure is not None:
                raise failure
            generation = self._model.generation_config
            write_companions(Path(path), config, generation, self._model.dtype, type(self._model).__name__, self._spec)

        self._ranks.on_rank_zero(write)

    def shutdown(self) -> None:
        """Release the model."""
        del self._model, self._tokens, self._optimizer
        self._ranks.leave()


class Weights:
    """`WeightSource` of a model that is complete on every rank."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]):
        self._tensors = tensors

    def metadata(self) -> list[ParamMeta]:
        """Return the metadata of all parameters."""
        return [ParamMeta.of(name, tensor) for name, tensor in self._tensors.items()]

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each parameter."""
        return iter(self._tensors.items())

    iter_local = iter_full


class Optimizer:
    """AdamW, with the state that a checkpoint saves."""

    def __init__(self, model: torch.nn.Module, options: Options):
        self._options = options
        self._named = dict(model.named_parameters())
        self._adam = torch.optim.AdamW(
            self._named.values(), lr=options.lr, betas=options.betas, eps=options.eps,
            weight_decay=options.weight_decay, foreach=options.foreach,
        )  # fmt: skip
        self.step_number = 0
        for parameter in self._named.values():
            self._adam.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradient of each parameter; zeros if the loss does not depend on it."""
        for parameter in self._named.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return [parameter.grad for parameter in self._named.values()]

    def step(self) -> Metrics:
        """Clip and step, unless the gradient is not finite."""
        lr = learning_rate(self.step_number, self._options)
        norm = torch.nn.utils.clip_grad_norm_(self._named.values(), self._options.max_grad_norm)
        figures = {"grad_norm": float(norm), "lr": lr, "skipped": 0.0 if norm.isfinite() else 1.0}
        if norm.isfinite():
            self._adam.param_groups[0]["lr"] = lr
            self._adam.step()
            self.step_number += 1
            check_step([p.detach() for p in self._named.values()], lambda: self._named, self.step_number, figures)
        self._adam.zero_grad()
        return figures

    def state(self) -> Mapping[str, torch.Tensor]:
        """Return the live moments."""
        return {
            f"{moment}.{name}": self._adam.state[parameter][moment]
            for moment in ("exp_avg", "exp_avg_sq")
            for name, parameter in self._named.items()
        }

    def restored(self, step_number: int) -> None:
        """Continue after step `step_number`."""
        self.step_number = step_number
        for state in self._adam.state.values():
            state["step"].fill_(step_number)
