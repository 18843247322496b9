"""A training engine in one process, as of November 2026: rows are padded, and checkpoints have checksums."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from enginehouse.data import Batch, Ragged
from enginehouse.engines import (
    LossSpec,
    LossValue,
    Mean,
    Mesh,
    Metrics,
    ModelSpec,
    Outputs,
    ParamMeta,
    ProcessContext,
    TokenView,
)
from enginehouse.engines.options import TrainOptions
from enginehouse.engines.train import ALL


class Engine:
    """`TrainEngine`."""

    def setup(self, model: ModelSpec, options: TrainOptions, context: ProcessContext) -> None:
        self._options, self._path = options, model.path
        self._model = AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32).eval()
        self._named = dict(self._model.named_parameters())
        self._adam = torch.optim.AdamW(
            self._named.values(), lr=options.lr, betas=options.betas, eps=options.eps, weight_decay=options.weight_decay
        )
        self._step, self._weight = 0, 0.0
        self.mesh = Mesh.of({"dp": context.world_size}, context.rank)

    def _tokens(self, ids: Ragged, outputs: Outputs) -> Mapping[str, torch.Tensor]:
        if not len(ids.values):
            return {name: torch.zeros(0) for name in ("logprobs", "entropy") if getattr(outputs, name)}
        padded = ids.to_padded(0)
        mask = torch.arange(padded.shape[1]) < ids.lengths[:, None]
        logits = self._model(input_ids=padded, attention_mask=mask.long(), use_cache=False).logits.float()
        spread = (logits[:, :-1] / outputs.temperature).log_softmax(-1)
        found = {}
        if outputs.logprobs:
            found["logprobs"] = spread.gather(-1, padded[:, 1:, None]).squeeze(-1)
        if outputs.entropy:
            found["entropy"] = -(spread.exp() * spread).sum(-1)
        return {name: torch.nn.functional.pad(one, (1, 0))[mask] for name, one in found.items()}

    def forward(self, batch: Batch, outputs: Outputs) -> Batch:
        ids = batch.ragged("input_ids")
        with torch.no_grad():
            found = self._tokens(ids, outputs)
        if "loss_mask" in batch:
            found = {name: one * batch.ragged("loss_mask").values for name, one in found.items()}
        return Batch({name: Ragged(one, ids.offsets) for name, one in found.items()})

    def forward_backward(self, batch: Batch, loss: LossSpec) -> Metrics:
        from enginehouse.plugin import plugins

        ids = batch.ragged("input_ids")
        columns = {name: batch[name] for name in batch.columns if isinstance(batch[name], torch.Tensor | Ragged)}
        flat = {name: one.values if isinstance(one, Ragged) else one for name, one in columns.items()}
        row = torch.repeat_interleave(torch.arange(len(ids)), ids.lengths)
        view = TokenView(self._tokens(ids, loss.outputs), flat, row, len(ids))
        value: LossValue = plugins().function("loss", loss.name)(view, **loss.arguments)
        if value.total.requires_grad:
            value.total.backward()
        self._weight += value.weight
        return {**value.metrics, "loss": Mean(value.total.item(), value.weight)}

    def optim_step(self) -> Metrics:
        for one in self._named.values():
            one.grad = torch.zeros_like(one) if one.grad is None else one.grad / max(self._weight, 1.0)
        self._weight, lr = 0.0, self._rate()
        norm = torch.nn.utils.clip_grad_norm_(self._named.values(), self._options.max_grad_norm)
        if norm.isfinite():
            self._adam.param_groups[0]["lr"] = lr
            self._adam.step()
            self._step += 1
        self._adam.zero_grad()
        return {"grad_norm": float(norm), "lr": lr, "skipped": float(not norm.isfinite())}

    def _rate(self) -> float:
        options, after = self._options, self._step - self._options.warmup_steps
        if after < 0:
            return options.lr * (self._step + 1) / options.warmup_steps
        if options.schedule == "constant":
            return options.lr
        passed = min(1.0, after / max(1, options.total_steps - options.warmup_steps))
        left = 1.0 - passed if options.schedule == "linear" else (1.0 + math.cos(math.pi * passed)) / 2
        return options.lr * (options.min_lr_ratio + (1.0 - options.min_lr_ratio) * left)

    def weight_source(self) -> Weights:
        return Weights({name: one.detach() for name, one in self._named.items()})

    def save(self, path: str, what: tuple[str, ...] = ALL) -> None:
        os.makedirs(path, exist_ok=True)
        model = {name: one.detach() for name, one in self._named.items()}
        held = {"model": model, "sums": Weights(model).sums(), "optimizer": self._adam.state_dict(), "step": self._step}
        torch.save({**held, "rng": torch.get_rng_state()}, os.path.join(path, "early.pt"))

    def load(self, path: str, what: tuple[str, ...] = ALL) -> None:
        held = torch.load(os.path.join(path, "early.pt"), weights_only=True)
        with torch.no_grad():
            for name, one in self._named.items():
                one.copy_(held["model"][name])
        assert self.weight_source().sums() == held["sums"]
        self._adam.load_state_dict(held["optimizer"])
        self._step = held["step"]
        torch.set_rng_state(held["rng"])

    def export_hf(self, path: str) -> None:
        self._model.save_pretrained(path)
        AutoTokenizer.from_pretrained(self._path).save_pretrained(path)

    def shutdown(self) -> None:
        del self._model, self._adam, self._named


class Weights:
    """`WeightSource` of a model that is whole here."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]):
        self._tensors = tensors

    def sums(self) -> dict[str, str]:
        from enginehouse.engines.weights import checksum

        return {name: checksum(one) for name, one in self._tensors.items()}

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta.of(name, one) for name, one in self._tensors.items()]

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._tensors.items())

    iter_local = iter_full
