"""The right answers: plain transformers, one row at a time, autograd and `torch.optim.AdamW`, in float32.

Softmax over the vocabulary is in float64. In float32, rounding alone is 1.4e-5 nats over 49,152 tokens, as much as
engines may be off. The oracle shares no code with any engine: no layout of rows, loss, optimizer or schedule.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from enginehouse.data import Batch
from enginehouse_testing.problem import CLIP, ENTROPY, TEMPERATURE

Weights = dict[str, torch.Tensor]

VALUE_HEAD = "score.weight"
"""The name of a value head's weight in a checkpoint."""


class Oracle:
    """Scores and trains one model in the plainest way.

    Args:
        path: a Hugging Face model directory.
        value_head: weight `(1, hidden)` if the model computes values instead of logprobs.
    """

    def __init__(self, path: str, value_head: torch.Tensor | None = None):
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.value_head = None if value_head is None else torch.nn.Parameter(value_head.clone())

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield the trained parameters."""
        for name, parameter in self.model.named_parameters():
            if self.value_head is None or not name.startswith("lm_head."):
                yield name, parameter
        if self.value_head is not None:
            yield VALUE_HEAD, self.value_head

    def weights(self) -> Weights:
        """Return a copy of all parameters as a checkpoint stores them; tied parameters occur once."""
        return self._stored({name: parameter.detach().clone() for name, parameter in self.named_parameters()})

    def row(self, ids: torch.Tensor, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logprobs and entropy of one row's tokens, each float32 `(tokens,)`; 0 at position 0."""
        logits = self.model(input_ids=ids[None]).logits[0, :-1].double() / temperature
        distribution = torch.log_softmax(logits, dim=-1)
        logprobs = distribution.gather(-1, ids[1:, None])[:, 0]
        entropy = -(distribution.exp() * distribution).sum(-1)
        return torch.cat([torch.zeros(1), logprobs.float()]), torch.cat([torch.zeros(1), entropy.float()])

    @torch.no_grad()
    def distributions(self, ids: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
        """Return logprobs of the whole vocabulary after each token of a row, float32 `(tokens, vocabulary)`."""
        logits = self.model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0].double()
        return torch.log_softmax(logits / temperature, dim=-1).float()

    @torch.no_grad()
    def continued(self, other: Oracle, ids: Sequence[int], begin: int) -> torch.Tensor:
        """Return logprobs of the tokens after `begin`, `(tokens - begin - 1,)`, if another model computed the keys and
        values of the tokens before `begin`."""
        tokens = torch.tensor([list(ids)])
        kept = other.model(input_ids=tokens[:, :begin], use_cache=True).past_key_values
        name = "cache" if "cache" in inspect.signature(self.model.forward).parameters else "past_key_values"
        logits = self.model(input_ids=tokens[:, begin:], **{name: kept}).logits[0, :-1].double()
        return torch.log_softmax(logits, dim=-1).gather(1, tokens[0, begin + 1 :, None])[:, 0].float()

    def row_values(self, ids: torch.Tensor) -> torch.Tensor:
        """Return values of one row's tokens, float32 `(tokens,)`: the value before each token; 0 at position 0."""
        assert self.value_head is not None
        hidden = self.model.base_model(input_ids=ids[None]).last_hidden_state[0, :-1]
        return torch.cat([torch.zeros(1), (hidden @ self.value_head.T)[:, 0]])

    def scores(self, batch: Batch, temperature: float = 1.0, masked: bool = True) -> dict[str, torch.Tensor]:
        """Return `logprobs` and `entropy`, or `values`, concatenated over all rows; 0 where `loss_mask` is false."""
        columns: dict[str, list[torch.Tensor]] = {}
        with torch.no_grad():
            for row in range(len(batch)):
                values = batch.row(row)
                if self.value_head is None:
                    logprobs, entropy = self.row(values["input_ids"], temperature)
                    scores = {"logprobs": logprobs, "entropy": entropy}
                else:
                    scores = {"values": self.row_values(values["input_ids"])}
                for name, column in scores.items():
                    part = torch.where(values["loss_mask"], column, 0.0) if masked else column
                    columns.setdefault(name, []).append(part)
        return {name: torch.cat(parts) for name, parts in columns.items()}

    def loss(self, batch: Batch) -> torch.Tensor:
        """Return the mean over the batch's loss tokens: a clipped policy loss with entropy bonus, or squared errors."""
        total, counted = torch.zeros(()), 0
        for row in range(len(batch)):
            values = batch.row(row)
            chosen = values["loss_mask"]
            if self.value_head is None:
                logprobs, entropy = self.row(values["input_ids"], TEMPERATURE)
                ratio = torch.exp(logprobs - values["old_logprobs"])
                token_losses = -(torch.clamp(ratio, max=1 + CLIP) * values["advantages"] + ENTROPY * entropy)
            else:
                token_losses = (self.row_values(values["input_ids"]) - values["returns"]) ** 2
            total = total + token_losses[chosen].sum()
            counted += int(chosen.sum())
        return total / counted

    def gradients(self, batch: Batch) -> tuple[float, Weights]:
        """Return the loss, and the gradient of each parameter, with names and shapes as in a checkpoint."""
        names, parameters = zip(*self.named_parameters(), strict=True)
        loss = self.loss(batch)
        gradients = dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))
        return float(loss.detach()), self._stored(gradients)

    def _stored(self, weights: Weights) -> Weights:
        """Rename and split tensors as in a checkpoint: transformers runs all experts of a layer as one tensor."""
        from transformers.core_model_loading import revert_weight_conversion

        stored: Weights = revert_weight_conversion(self.model, weights)
        return stored

    def train(self, batch: Batch, steps: int, options: dict[str, Any]) -> list[dict[str, float]]:
        """Take optimizer steps on the same batch.

        Args:
            batch: all rows.
            steps: number of steps.
            options: `lr`, `betas`, `eps`, `weight_decay`, `max_grad_norm`, `warmup_steps`, `total_steps` and
                `min_lr_ratio` of a cosine schedule.

        Returns:
            `loss`, `grad_norm` before clipping and `lr` of each step.
        """
        parameters = [parameter for _, parameter in self.named_parameters()]
        optimizer = torch.optim.AdamW(
            parameters,
            lr=0.0,
            betas=options["betas"],
            eps=options["eps"],
            weight_decay=options["weight_decay"],
            foreach=False,
        )
        figures = []
        for step in range(steps):
            optimizer.zero_grad()
            loss = self.loss(batch)
            loss.backward()
            norm = float(torch.nn.utils.clip_grad_norm_(parameters, options["max_grad_norm"]))
            lr = cosine_rate(step, options)
            optimizer.param_groups[0]["lr"] = lr
            optimizer.step()
            figures.append({"loss": float(loss.detach()), "grad_norm": norm, "lr": lr})
        return figures


def cosine_rate(step: int, options: dict[str, Any]) -> float:
    """Return the rate of a linear warm-up to `lr`, then a half cosine to `min_lr_ratio * lr` at `total_steps`."""
    warmup = options["warmup_steps"]
    if step < warmup:
        return options["lr"] * (step + 1) / warmup
    part = min(1.0, (step - warmup) / (options["total_steps"] - warmup))
    low = options["min_lr_ratio"]
    return options["lr"] * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * part)))
