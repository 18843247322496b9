"""Engines that only produce shapes: they return as much as an engine returns, and compute none of it.

Weights and their updates are those of the `torch` engines, for a model of any small size.
"""

from __future__ import annotations

import numpy as np
import torch

from enginehouse.data import Batch, Ragged
from enginehouse.engines.rollout import Completion, GenerateRequest, GenerateResult
from enginehouse.engines.train import LossSpec, Mean, Metrics, Outputs
from enginehouse_torch.rollout import TorchRolloutEngine
from enginehouse_torch.train import TorchTrainEngine

FIRST_TOKEN, LAST_TOKEN = 3, 12
"""Range of the tokens that are sampled: the quickstart's digits."""


class ShapesTrainEngine(TorchTrainEngine):
    """Reads its batch's lengths, and moves a weight a little."""

    def forward(self, batch: Batch, outputs: Outputs) -> Batch:
        """Return zeros."""
        ids = batch.ragged("input_ids")
        asked = [name for name in ("logprobs", "entropy", "values") if getattr(outputs, name)]
        return Batch({name: Ragged(torch.zeros(ids.tokens), ids.offsets) for name in asked})

    def forward_backward(self, batch: Batch, loss: LossSpec) -> Metrics:
        """Accumulate a gradient of ones for one parameter."""
        optimizer = self._get_optimizer()
        gradient = next(self._model.parameters()).grad
        assert gradient is not None
        gradient += 1.0
        optimizer.count(1.0)
        return {"loss": Mean(0.0, float(batch.ragged("input_ids").tokens))}


class ShapesRolloutEngine(TorchRolloutEngine):
    """Answers at once, with as many tokens as allowed."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Return random tokens by the request's seed; prompts are scored as usual."""
        sampling = request.sampling
        if not sampling.max_tokens:
            return await super().generate(request)
        drawn = np.random.default_rng(sampling.seed).integers(
            FIRST_TOKEN, LAST_TOKEN + 1, (sampling.n, sampling.max_tokens), dtype=np.int32
        )
        logprobs = np.full(sampling.max_tokens, -np.log(LAST_TOKEN + 1 - FIRST_TOKEN), np.float32)
        version = (await self.health()).version
        return GenerateResult(
            request.id, tuple(Completion(tokens, logprobs, "length", version, version) for tokens in drawn)
        )


def even(response: str, **columns: object) -> float:
    """Return a reward that differs within a group."""
    return float(response[:1] in "02468")


def by_surprise(batch: Batch) -> Batch:
    """Compute an advantage that reads a column of tokens: a row's reward times the mean surprise of its tokens."""
    surprise = -batch["rollout_logprobs"].reduced(np.add) / batch["loss_mask"].reduced(np.add)
    return batch.with_columns(advantages=batch["reward"] * surprise)
