"""The training loop that an expert writes by hand for one model and one task: FSDP2, or no sharding at all.

It uses nothing of enginehouse. Micro-batches hold rows of similar length, right-padded to the longest. `whole_logits`
is
the simplest form: every row is padded to the longest of the batch, and every position has logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

Row = tuple[list[int], int]
"""The tokens of a row, and the number of its first tokens that are the prompt, which the loss does not count."""


class SummedLoss(torch.nn.Module):
    """The model and its loss as one module, so that the output layer runs only where it is needed."""

    def __init__(self, model: torch.nn.Module, whole_logits: bool):
        super().__init__()
        self.model: Any = model
        self.whole_logits = whole_logits

    def forward(self, ids: torch.Tensor, predicting: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the summed negative log-likelihood in nats of `targets`, after the flat positions `predicting`."""
        if self.whole_logits:
            logits = self.model(ids, use_cache=False).logits.flatten(0, 1)
            labels = torch.full((len(logits),), -100, device=ids.device)
            labels[predicting] = targets
            return F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
        hidden = self.model.model(ids, use_cache=False).last_hidden_state.flatten(0, 1)[predicting]
        return F.cross_entropy(self.model.lm_head(hidden), targets, reduction="sum")


@dataclass(frozen=True)
class Settings:
    """Settings of both programs.

    Attributes:
        budget: maximum padded tokens of one forward pass.
    """

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    budget: int = 2048


class BareLoop:
    """One rank of the loop.

    Args:
        path: model directory.
        settings: settings of the optimizer, and the token budget.
        device: device that the loop computes on.
        sharded: True for FSDP2 over the ranks of the process group, a unit per block; False: one rank, plain PyTorch.
        whole_logits: True for the simplest form instead of the best.
    """

    def __init__(self, path: str, settings: Settings, device: torch.device, *, sharded: bool, whole_logits: bool):
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        model = model.to(device).eval()
        self.loss = SummedLoss(model, whole_logits)
        self.ranks = dist.get_world_size() if sharded else 1
        if sharded:
            for block in model.model.layers:
                fully_shard(block)
            fully_shard(self.loss)
        self.settings, self.device, self.whole_logits = settings, device, whole_logits
        self.adamw = torch.optim.AdamW(
            self.loss.parameters(), lr=settings.lr, betas=settings.betas, eps=settings.eps,
            weight_decay=settings.weight_decay, fused=True,
        )  # fmt: skip

    def step(self, rows: Sequence[Row]) -> tuple[float, int, float]:
        """Take one optimizer step on this rank's rows; every rank has as many.

        Returns:
            The loss in nats, summed over this rank's counted tokens; their number; the gradient's norm before clipping.
        """
        longest = max(len(ids) for ids, _ in rows) - 1
        at_once = max(1, self.settings.budget // longest)  # the same number of passes on every rank with equal rows
        rows = rows if self.whole_logits else sorted(rows, key=lambda row: len(row[0]))
        counted = sum(len(ids) - prompt for ids, prompt in rows)
        everywhere = torch.tensor(counted, device=self.device)
        if self.ranks > 1:
            dist.all_reduce(everywhere)
        scale = self.ranks / everywhere.item()  # FSDP takes the mean over the ranks
        total = torch.zeros((), device=self.device)
        for start in range(0, len(rows), at_once):
            loss = self.loss(*self.padded(rows[start : start + at_once], longest))
            (loss * scale).backward()
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(self.loss.parameters(), self.settings.max_grad_norm)
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        return total.item(), counted, (norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item()

    def padded(self, rows: Sequence[Row], longest: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return ids `(rows, length)`, flat positions that predict a counted token, and these tokens."""
        length = longest if self.whole_logits else max(len(ids) for ids, _ in rows) - 1
        ids = torch.tensor([row[:-1] + [0] * (length - len(row) + 1) for row, _ in rows])
        predicting = [
            number * length + at for number, (row, prompt) in enumerate(rows) for at in range(prompt - 1, len(row) - 1)
        ]
        targets = [token for row, prompt in rows for token in row[prompt:]]
        return ids.to(self.device), torch.tensor(predicting).to(self.device), torch.tensor(targets).to(self.device)
