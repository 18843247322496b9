"""The oracle's results, each computed once for all layouts."""

from __future__ import annotations

import functools
from typing import Any

import torch

from enginehouse_testing.oracle import Oracle
from enginehouse_testing.problem import batch, batch_of, model_path

TRAINING: dict[str, Any] = {
    "lr": 1e-3,
    "betas": (0.9, 0.99),
    # Larger than usual. With an eps far below a gradient, AdamW moves a weight by the gradient's sign, and a sum in
    # another order could turn a sign even if only its last bit differs.
    "eps": 1e-5,
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
    "warmup_steps": 2,
    "schedule": "cosine",
    "total_steps": 8,
    "min_lr_ratio": 0.1,
}
"""Options of every check that trains."""

STEPS = 5


@functools.cache
def scores(model: str, temperature: float) -> dict[str, torch.Tensor]:
    """Return logprobs and entropy of all tokens of the whole batch."""
    return Oracle(model_path(model)).scores(batch_of(model), temperature, masked=False)


@functools.cache
def gradients(model: str) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the policy loss on the whole batch, and its gradient."""
    return Oracle(model_path(model)).gradients(batch_of(model))


@functools.cache
def trained(model: str, steps: int = STEPS) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Return the metrics of each step, and the weights after the last."""
    oracle = Oracle(model_path(model))
    return oracle.train(batch(), steps, TRAINING), oracle.weights()
